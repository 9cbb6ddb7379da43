"""Executes every notebook here from top to bottom, and writes the outputs back into it."""

import pathlib
import time

import nbformat
from nbclient import NotebookClient

for path in sorted(pathlib.Path(__file__).parent.glob("*.ipynb")):
    started = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: noise in every diff
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - started:.0f} s")
