"""The README and the pages: their blocks of code, and what a program of these prints."""

import re

from tests.processes import ROOT, output

README = ROOT / "README.md"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(directory, *parts):
    """What a program prints, started as a user's."""
    (directory / "page.py").write_text("\n".join(parts))
    return output(directory / "page.py", cwd=directory, MPLBACKEND="agg")[0]
