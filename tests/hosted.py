"""Runs a notebook from a wheel, with the packages that Colab or Kaggle have installed.

    make hosted PYTHON=python3.13    # as on Colab
    make hosted PYTHON=python3.12    # as on Kaggle

The wheel and the notebook lie alone in a folder, and the notebook's first cell installs the wheel.
A second session has imported JAX before, so that cell asks for a restart. Needs pip's index, and
takes 4 minutes. The versions are those of August 2026 in github.com/googlecolab/backend-info
(pip-freeze.txt), and of May in the image of Colab that Kaggle's is built on.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

NOTEBOOK = pathlib.Path(__file__).resolve().parents[1] / "notebooks/01_five_minutes.ipynb"
BOTH = "jax==0.7.2 jaxlib==0.7.2 flax==0.11.2 optax==0.2.8 matplotlib==3.10.0 scipy==1.16.3"
IMAGES = {  # by version of Python
    (3, 13): ("numpy==2.1.3 orbax-checkpoint==0.12.4 tensorstore==0.1.85", "Colab"),
    (3, 12): ("numpy==2.0.2 orbax-checkpoint==0.11.36 tensorstore==0.1.82", "Kaggle"),
}
SHOWN = ("jax==", "flax==", "numpy==", "orbax-checkpoint==")
# What a session may have in memory before the first cell.
BEFORE = "import numpy, matplotlib.pyplot"
EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
book.cells.insert(0, nbformat.v4.new_code_cell(sys.argv[2]))
nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
print(*[output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])])
"""


def run(*command: str, **options: object) -> str:
    """What a command prints, errors too."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    return done.stdout.decode()


def session(wheel: str, packages: str, before: str) -> str:
    """What a new session prints, and the versions that it ends with."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(sys.executable, "-m", "venv", f"{folder}/venv", check=True)
        run(*pip, "install", *BOTH.split(), *packages.split(), "ipykernel", "nbclient", check=True)
        os.mkdir(content := f"{folder}/content")
        shutil.copy(wheel, content)
        shutil.copy(NOTEBOOK, content)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["PATH"] = f"{folder}/venv/bin:{env['PATH']}"
        said = run(python, "-c", EXECUTE, NOTEBOOK.name, before, cwd=content, env=env)
        listed = run(*pip, "freeze").splitlines()
        return "\n".join([said, *(line for line in listed if line.startswith(SHOWN))])


def main() -> None:
    packages, image = IMAGES[sys.version_info[:2]]
    said = session(sys.argv[1], packages, BEFORE)
    print(said)
    assert f"pip install {pathlib.Path(sys.argv[1]).name}[" in said, "another source"
    assert "stage 3 stores 12.5% of what stage 0 stores" in said, "the notebook did not end"
    assert packages.split()[0] in said, "another NumPy, while one is in memory"
    said = session(sys.argv[1], packages, f"{BEFORE}, jax")
    assert "An earlier JAX is in memory. Restart the session, and run all cells again." in said, (
        said
    )
    print(f"the notebook runs as on {image}, and asks for a restart where JAX was in memory")


if __name__ == "__main__":
    main()
