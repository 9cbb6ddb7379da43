"""What publishes a release: metadata, workflows, and the files that speak of versions."""

import datetime
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import types

import pytest
import yaml

import zerojax
from tests import release

ROOT = release.ROOT
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in GITHUB.glob("workflows/*.yml")}
JOBS = {(w, name): job for w, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()}
# All that any job may do but read the repository.
MAY = {
    ("docs", "site"): {"contents": "write"},
    ("release", "attest"): {"id-token": "write", "attestations": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "announce"): {"contents": "write"},
}


def said(pattern):
    """What the workflows say of it."""
    texts = [path.read_text() for path in sorted(GITHUB.glob("workflows/*.yml"))]
    return re.findall(pattern, "\n".join(texts))


def test_jobs_may_do_no_more_than_they_need():
    assert {"tests", "nightly", "docs", "release"} == WORKFLOWS.keys()
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    assert {key: job["permissions"] for key, job in JOBS.items() if "permissions" in job} == MAY
    assert all("timeout-minutes" in job for job in JOBS.values())
    assert JOBS["release", "publish"]["environment"] == "pypi"
    assert not said("secrets|pull_request_target|password")
    kept = [
        step for job in JOBS.values() for step in job["steps"] if "checkout" in step.get("uses", "")
    ]
    assert len(kept) >= 6 and not any(step["with"]["persist-credentials"] for step in kept)


def test_actions_are_pinned_and_each_is_one():
    uses = said(r"uses: (.*)")
    pins = {
        re.fullmatch(r"([\w/-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", use).groups() for use in uses
    }
    assert len(uses) >= 15 and len({action for action, _, _ in pins}) == len(pins) >= 6


def test_nothing_is_published_that_was_not_tried():
    needs = {name: job.get("needs", []) for (flow, name), job in JOBS.items() if flow == "release"}
    assert needs["try"] == "build" and {"try", "attest"} < {*needs["publish"]}
    assert needs["announce"] == "publish" and "try" in needs["attest"]
    for name in ("attest", "publish", "announce"):
        assert JOBS["release", name]["if"] == "github.event_name == 'push'"
    assert WORKFLOWS["release"][True]["push"] == {"tags": ["v*"]}  # to YAML, `on` is true


def test_workflows_run_targets_that_there_are_on_each_python():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "test-ci", "lint"} <= set(said(r"\bmake ([\w-]+)")) <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    matrices = [job["strategy"]["matrix"]["python"] for job in JOBS.values() if "strategy" in job]
    assert matrices == [pythons] * 2 and len(pythons) >= 3


def test_owners_and_forms_name_files_that_there_are():
    lines = [line.split()[0] for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line]
    paths = [line[1:] for line in lines if line[0] == "/"]
    texts = [path.read_text() for path in (*GITHUB.rglob("*.yml"), *GITHUB.glob("*.md"))]
    pages = re.findall(r"\.\./blob/main/([\w/.]+)|`([\w/]+\.(?:md|py))`", "\n".join(texts))
    paths += [first or second for first, second in pages]
    assert len(paths) >= 9 and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.fixture
def project(tmp_path):
    """The files that speak of versions and addresses, which is none yet."""
    for name in ("CHANGELOG.md", *release.SAYS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    for path, text in release.addressed(ROOT, "").items():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    return tmp_path


# -- the metadata

OF = "GITHUB_REPOSITORY"
LINK = r'(\]\(|\b(?:href|src|srcset)=")([^)"]+)'


def hook():
    """hatch_build.py, without hatchling, which only builds need."""
    name = "hatchling.metadata.plugin.interface"
    plugin = types.SimpleNamespace(MetadataHookInterface=object)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, plugin)
        spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def metadata(monkeypatch, address="", **env):
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = {"version": "1.2.3"}
    own = types.SimpleNamespace(root=str(ROOT), config={"address": address})
    hook().CustomMetadataHook.update(own, found)
    return found


def test_a_build_elsewhere_names_no_address(monkeypatch):
    found = metadata(monkeypatch)
    readme = (ROOT / "README.md").read_text()
    assert found["readme"] == {"content-type": "text/markdown", "text": readme}
    assert "urls" not in found


def test_links_of_a_release_lead_into_its_repository(monkeypatch):
    env = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "me/zerojax"}
    found = metadata(monkeypatch, **env)
    assert found == metadata(monkeypatch, "https://git.example/me/zerojax")
    assert found == metadata(monkeypatch, "https://git.example/me/zerojax", **env | {OF: "a/fork"})
    own = "https://git.example/me/zerojax"
    assert found["urls"]["Source"] == own and found["urls"]["Issues"] == f"{own}/issues"
    before = [link for _, link in re.findall(LINK, (ROOT / "README.md").read_text())]
    after = [link for _, link in re.findall(LINK, found["readme"]["text"])]
    assert len(before) > 20
    for link, led in zip(before, after, strict=True):
        kind = "raw" if link.endswith((".svg", ".png")) else "blob"
        elsewhere = re.match("https?:|#", link)
        assert led == (link if elsewhere else f"{own}/{kind}/v1.2.3/{link}")
    paths = [url.removeprefix(f"{own}/blob/v1.2.3/") for url in found["urls"].values()]
    assert [(ROOT / path).exists() for path in paths if "://" not in path] == [True, True]
    same = '[a](#b) [c](mailto:d) <a href="//e">'
    assert hook().with_addresses(same, own, "v1.2.3") == same


# -- the repository's address


def test_the_address_is_that_of_pyproject_wherever_a_file_says_it():
    """`python tests/release.py --address` writes it: it changes everywhere, or nowhere."""
    address = release.address_in(ROOT)
    files = release.addressed(ROOT, address)
    assert len(files) == 8
    assert [path for path, text in files.items() if path.read_text() != text] == []


def test_no_other_file_says_an_address_of_zerojax():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if not name.startswith("tests/")]
    paths = [path for path in paths if path.suffix not in (".png", ".xz") and path.is_file()]
    says = re.compile(r"(https?://|git@)[\w.:/-]+/zerojax\b|/blob/main/notebooks|colab\.research")
    assert len(paths) > 300
    allowed = release.addressed(ROOT, "")  # the variable and its copies, without it
    texts = {path: allowed.get(path, path.read_text()) for path in paths}
    examples = {"pyproject.toml": 1, "RELEASING.md": 1, "hooks.py": 1}  # of an OWNER, and Colab
    told = {path.name: len(says.findall(text)) for path, text in texts.items()}
    assert {name: count for name, count in told.items() if count} == examples


def test_another_address_changes_all_places(project):
    first, second = "https://git.example/me/zerojax", "https://git.example/you/zerojax"
    empty = {path: path.read_text() for path in release.addressed(project, "")}
    for address in (first, second):
        for path, text in release.addressed(project, address).items():
            path.write_text(text)
            assert text.count(address) == 1
        assert release.address_in(project) == address
    assert all(first not in path.read_text() for path in empty)
    assert yaml.safe_load((project / "CITATION.cff").read_text())["repository-code"] == second
    assert (
        f'REPOSITORY = "{second}"  #'
        in json.loads((project / "notebooks/05_one_gpu.ipynb").read_text())["cells"][1]["source"][1]
    )
    assert release.addressed(project, "") == empty


# -- versions


def test_the_version_is_said_once_and_the_same_everywhere():
    wrong = release.problems(ROOT, f"v{zerojax.__version__}")
    assert set(wrong) <= {f"CHANGELOG.md says nothing of {zerojax.__version__}"}  # until it is out
    listed = {"metadata": {"component": {"name": "zerojax"}}, "components": []}
    text = release.sbom_of(json.dumps(listed), release.version_in(ROOT))
    assert json.loads(text)["metadata"]["component"]["version"] == zerojax.__version__


def test_a_release_is_prepared_and_checked(project):
    before = release.notes_of((project / "CHANGELOG.md").read_text(), "Unreleased")
    assert release.problems(project, "v7.0.0") == [
        'zerojax/__init__.py does not say __version__ = "7.0.0"',
        "CITATION.cff does not say version: 7.0.0",
        "CHANGELOG.md says nothing of 7.0.0",
    ]
    release.prepare(project, "7.0.0")
    assert release.problems(project, "v7.0.0") == []
    text = (project / "CHANGELOG.md").read_text()
    assert f"## Unreleased\n\n## 7.0.0 - {datetime.date.today()}\n" in text
    assert release.notes_of(text, "7.0.0") == before != ""
    assert "cff-version: 1.2.0" in (project / "CITATION.cff").read_text()
    with pytest.raises(SystemExit, match='nothing under "Unreleased"'):
        release.prepare(project, "7.0.1")
    for tag in ("7.0.0", "v7.0", "vx"):
        assert release.problems(project, tag) == [f"the tag {tag} is not a v and a version"]


def test_what_is_not_ready_is_not_published():
    command = [sys.executable, "tests/release.py", "--check", "v99.0.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "CHANGELOG.md says nothing" in done.stderr
