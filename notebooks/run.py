"""Executes every notebook here from top to bottom, and writes the outputs back into it.

python notebooks/run.py            # all of them
python notebooks/run.py 02 04      # those whose names start with 02 or 04
"""

import concurrent.futures
import os
import pathlib
import re
import sys
import time

import nbformat
from nbclient import NotebookClient

# Seconds for a notebook, and until its first picture: twice the time that two idle cores may take,
# since CI runs other things beside.
LIMIT, FIRST_PICTURE = 600, 120
WAITS = re.compile(r"(zerojax: XLA compiles .*\n)+\Z")
MACHINE = re.compile(r"/(?:tmp|root|home|Users|usr|opt|work)/|ipykernel_\d")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hides notes for the compiler's developers
os.environ.setdefault("ZEROJAX_CACHE", "")  # whose folder a first run would name


def execute(path: pathlib.Path) -> tuple[float, float]:
    """Executes one notebook in place, and returns the seconds to its first picture and in all."""
    started = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    pictures = []

    def note_picture(cell: nbformat.NotebookNode, **_: object) -> None:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            pictures.append(time.perf_counter() - started)

    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
        on_cell_executed=note_picture,
    )
    client.execute()
    seconds = time.perf_counter() - started
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day are noise in every diff
    notebook.metadata.pop("language_info", None)
    check(path.name, notebook)
    new = path.with_suffix(".new")
    nbformat.write(notebook, new)
    new.replace(path)  # at once, because a build of the site may read it
    print(f"{path.name}: {seconds:.0f} s, first picture {pictures[0]:.0f} s", flush=True)
    return pictures[0], seconds


def check(name: str, notebook: nbformat.NotebookNode) -> None:
    """Raises if an output is a warning, or names a path of this machine. Drops lines that a slow
    compiler causes."""
    for number, cell in enumerate(notebook.cells):
        if cell.get("outputs"):
            cell.outputs = [one for one in cell.outputs if not WAITS.match(one.get("text", ""))]
        for output in cell.get("outputs", []):
            pictureless = {k: v for k, v in output.get("data", {}).items() if "image" not in k}
            text = f"{output.get('text', '')}{pictureless}"
            if output.get("name") == "stderr" or MACHINE.search(text):
                raise SystemExit(f"{name}, cell {number} prints more than results:\n{text}")


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:]) or ("",)
    paths = sorted(pathlib.Path(__file__).parent.glob("*.ipynb"))
    # Two at a time: each waits for its kernel, and for a compiler that is not parallel throughout.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        chosen = [path for path in reversed(paths) if path.name.startswith(wanted)]  # 06 is longest
        try:
            took = dict(zip([one.name for one in chosen], pool.map(execute, chosen), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    slow = [
        name
        for name, (first, all_of_it) in took.items()
        if first > FIRST_PICTURE or all_of_it > LIMIT
    ]
    if slow:
        limits = f"{FIRST_PICTURE} s to a picture, {LIMIT} s in all"
        raise SystemExit(f"more than the promised {limits}: {', '.join(slow)}")
