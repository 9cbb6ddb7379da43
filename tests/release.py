"""Prepares a release, or checks that one is whole.

    python tests/release.py 0.2.0            # the version, the changelog and the citation say 0.2.0
    python tests/release.py --check v0.2.0   # prints its notes, if all of them say so
    python tests/release.py --sbom FILE      # puts the version into a list of packages
    python tests/release.py --address https://github.com/OWNER/zerojax    # all files say so

RELEASING.md says when.
"""

import datetime
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
UNRELEASED = "## Unreleased\n"
# What says the version: a file, and the line that says it.
SAYS = {
    "zerojax/__init__.py": '__version__ = "{}"',
    "CITATION.cff": "version: {}",
}

# What says the repository's address: its variable, and files that cannot read that.
ADDRESS = r"(https://[\w./:-]*[\w-])?"
SAY_ADDRESS = {
    "pyproject.toml": re.compile(r'(?<=^address = ")[^"]*', re.MULTILINE),
    "CITATION.cff": re.compile(
        r"(?<=^license: Apache-2.0\n)(repository-code: .*\n)?", re.MULTILINE
    ),
    "notebooks/*.ipynb": re.compile(r'(?<="REPOSITORY = \\")[^"\\]*'),
}


def changelog_of(text: str, version: str, day: datetime.date) -> str:
    """Returns a changelog in which what was unreleased is a release of that day."""
    if not notes_of(text, "Unreleased"):
        sys.exit('CHANGELOG.md has nothing under "Unreleased"')
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## {version} - {day}\n", 1)


def notes_of(text: str, version: str) -> str:
    """Returns the part of a changelog under a version's heading."""
    heading = rf"^## {re.escape(version)}(?: - \d{{4}}-\d\d-\d\d)?\n(.*?)(?=^## |\Z)"
    found = re.search(heading, text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def with_version(text: str, line: str, version: str) -> str:
    pattern = "^" + re.escape(line).replace(r"\{\}", ".*?") + "$"
    new, count = re.subn(pattern, line.format(version), text, flags=re.MULTILINE)
    assert count == 1, f"{count} lines are {line}"
    return new


def prepare(root: pathlib.Path, version: str) -> None:
    changelog = root / "CHANGELOG.md"
    changed = {changelog: changelog_of(changelog.read_text(), version, datetime.date.today())}
    for name, line in SAYS.items():
        changed[root / name] = with_version((root / name).read_text(), line, version)
    for path, text in changed.items():
        path.write_text(text)


def problems(root: pathlib.Path, tag: str) -> list[str]:
    """Returns what is not ready for a tag to be published."""
    version = tag.removeprefix("v")
    if tag == version or not VERSION.fullmatch(version):
        return [f"the tag {tag} is not a v and a version"]
    found = [
        f"{name} does not say {line.format(version)}"
        for name, line in SAYS.items()
        if line.format(version) not in (root / name).read_text().splitlines()
    ]
    if not notes_of((root / "CHANGELOG.md").read_text(), version):
        found.append(f"CHANGELOG.md says nothing of {version}")
    return found


def version_in(root: pathlib.Path) -> str:
    return re.search(r'__version__ = "(.+)"', (root / "zerojax/__init__.py").read_text())[1]


def address_in(root: pathlib.Path) -> str:
    return SAY_ADDRESS["pyproject.toml"].search((root / "pyproject.toml").read_text())[0]


def addressed(root: pathlib.Path, address: str) -> dict[pathlib.Path, str]:
    """Returns the files that say the repository's address, with this one."""
    changed = {}
    for pattern, place in SAY_ADDRESS.items():
        citation = f"repository-code: {address}\n" if address else ""
        said = citation if pattern == "CITATION.cff" else address
        for path in root.glob(pattern):
            changed[path], count = place.subn(said, path.read_text())
            assert count == 1, f"{path} says the address {count} times"
    return changed


def sbom_of(text: str, version: str) -> str:
    """Returns a CycloneDX list in which zerojax has its version, which pyproject.toml has not."""
    listed = json.loads(text)
    listed["metadata"]["component"]["version"] = version
    return json.dumps(listed, indent=2) + "\n"


def main() -> None:
    match sys.argv[1:]:
        case ["--check", tag]:
            if found := problems(ROOT, tag):
                sys.exit("\n".join(found))
            print(notes_of((ROOT / "CHANGELOG.md").read_text(), tag.removeprefix("v")))
        case ["--sbom", name]:
            path = pathlib.Path(name)
            path.write_text(sbom_of(path.read_text(), version_in(ROOT)))
        case ["--address", address] if re.fullmatch(ADDRESS, address):
            for path, text in addressed(ROOT, address).items():
                path.write_text(text)
        case [version] if VERSION.fullmatch(version):
            prepare(ROOT, version)
            print(f"git commit -am 'Release {version}' && git tag v{version}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
