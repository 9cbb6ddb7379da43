"""Runs the README's program with what is installed, and not with this checkout.

python tests/outside.py        # with the Python of a venv that holds the wheel; make wheel
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVERY_NAME = "import zerojax; print(zerojax.__file__); [getattr(zerojax, n) for n in dir(zerojax)]"


def run(*arguments: str) -> str:
    """What Python prints in an empty directory."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=tempfile.mkdtemp()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[2]
    printed = run("-c", program + EVERY_NAME)
    assert "ZeRO stage 3 over data=8" in printed, printed
    where = printed.splitlines()[-1]
    assert "site-packages" in where, where
    assert "7.5B" in run("-m", "zerojax", "table")
    for name in ("matplotlib", "pytest"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed: more than the wheel"
    files = importlib.metadata.files("zerojax") or []
    assert any(file.name == "py.typed" for file in files)
    assert not [file for file in files if file.parts[0] in ("tests", "docs", "examples")]
    print(f"zerojax {importlib.metadata.version('zerojax')} works outside of its checkout")


if __name__ == "__main__":
    main()
