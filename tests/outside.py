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
EXTRAS = ("matplotlib", "pytest", "safetensors", "mkdocs")  # and others, none of which it needs


def main() -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    program += (
        "import zerojax; print(zerojax.__file__); [getattr(zerojax, n) for n in dir(zerojax)]"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = lambda *command: subprocess.run(  # noqa: E731
        [sys.executable, "-W", "error::DeprecationWarning:zerojax", *command], check=True, text=True,
        capture_output=True, env=env, cwd=tempfile.mkdtemp(),
    ).stdout  # fmt: skip
    printed = run("-c", program)
    where = printed.splitlines()[-1]
    assert "site-packages" in where and str(ROOT / "zerojax") not in where, where
    assert "ZeRO stage 3 over data=8" in printed, printed
    assert "7.5B" in run("-m", "zerojax", "table")
    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not present, f"not alone: {present}"
    files = importlib.metadata.files("zerojax") or []
    assert any(file.name == "py.typed" for file in files)
    assert not [file for file in files if file.parts[0] in ("tests", "docs", "examples")]
    print(f"zerojax {importlib.metadata.version('zerojax')} works outside of its checkout")


if __name__ == "__main__":
    main()
