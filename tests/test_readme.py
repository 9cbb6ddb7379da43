"""The README's Python blocks run, in order, as one program; its commands exist."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(tmp_path):
    first, program, *rest = blocks("python")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = tmp_path / "readme.py"
    script.write_text("\n".join([program, "data = [batch] * 2", first, *rest]))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss 0\.\d+, w1 \(8, 512\)", done.stdout), done.stdout
    assert "ZeRO stage 3 over data=8" in done.stdout


def test_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"make (\w+)", "".join(blocks("bash")))
    assert commands == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in commands)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
