"""The README and the guide: their programs and commands run, and what their text names is there."""

import functools
import inspect
import json
import re
import shlex
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import zerojax
from tests.support.processes import ROOT, output

README, INDEX = ROOT / "README.md", ROOT / "docs/index.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OTHERS = ["CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md"]
OTHERS = [ROOT / name for name in (*OTHERS, "benchmarks/README.md", "examples/README.md")]
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
QUICK_PAGE = "stages"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def codes(page):
    """A page's code for a Flax nnx model, and all other code."""
    parts = blocks(page, "python")
    nnx = [part for part in parts if part.startswith("# Flax nnx\n")]
    return nnx, [part for part in parts if part not in nnx]


def run(directory, *parts):
    """What a program prints, started as a user's."""
    (directory / "page.py").write_text("\n".join(parts))
    return output(directory / "page.py", cwd=directory, MPLBACKEND="agg")[0]


def programs():
    """The program for a Flax nnx model, and the one for a `TrainState`."""
    return codes(README)[0][1], codes(INDEX)[1][0]


def test_the_readme_is_a_program(tmp_path):
    for (two_lines, *_), program, shown in zip(
        codes(README), programs(), ("up", "w1"), strict=True
    ):
        printed = run(tmp_path, program, "data = [batch] * 2", two_lines)
        assert re.search(rf"loss 0\.\d+, {shown} \(8, 512\)", printed), printed
        assert "ZeRO stage 3 over data=8" in printed


@pytest.fixture(scope="module")
def readme():
    """What the two programs leave: the pages go on from there."""

    def names_of(program):
        names = {"__name__": "__main__"}
        exec(program.replace(DEVICES, ""), names)
        return names

    return list(map(names_of, programs()))


def copied(names):
    """With arrays of their own: steps donate them."""
    if "model" not in names:
        return {**names, "state": jax.tree.map(jnp.copy, names["state"])}
    graph, arrays = nnx.split((names["model"], names["optimizer"]))
    model, optimizer = nnx.merge(graph, jax.tree.map(jnp.copy, arrays))
    return {**names, "model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.ci] * (page.stem != QUICK_PAGE), id=page.stem)
        for page in PAGES[1:]
        if blocks(page, "python")
    ],
)
@pytest.mark.filterwarnings("default")  # as for a user
def test_pages_run(page, readme, tmp_path, monkeypatch, as_it_was):
    """All in this process, from the two programs on; some are programs of their own.

    Code for nnx runs after the page's other code, and has its names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(zerojax, "initialize", lambda: 1)  # too late in this process
    before = dict(jax.config.values)
    nnx_code, code = ("\n".join(part).replace(DEVICES, "") for part in codes(page))
    own = DEVICES in page.read_text()
    names = {"__name__": "__main__"} if own else copied(readme[1])
    exec(compile(code, page.name, "exec"), names)
    if nnx_code:
        exec(compile(nnx_code, page.name, "exec"), names if own else names | copied(readme[0]))
    assert dict(jax.config.values) == before, "it would change the tests that follow"


@pytest.mark.gpu_code
def test_the_forecasts_on_the_pages_run(tmp_path):
    code = [block for block in blocks(ROOT / "docs/gpus.md", "py") if "forecast(" in block]
    (of_nnx,) = blocks(ROOT / "docs/models.md", "py")
    nnx, state = programs()
    printed = run(tmp_path, state, *code, nnx.replace(DEVICES, ""), of_nnx)
    assert printed.count("8xH100, ") == 5 and "Fastest that fits" in printed, printed
    assert printed.count("all-gather") > 0, printed


# -- commands

INSTALL = zerojax.aot._install_command()
# What CI runs anyway, what a user sets, and what takes minutes and is played in tests/test_cli.py.
ELSEWHERE = re.compile(r"make (demo|test)$|export XLA_FLAGS=|zerojax (forecast .* --choose|study )")


def commands():
    text = "\n".join(block for page in PAGES for block in blocks(page, "bash"))
    lines = text.replace("\\\n", "").splitlines()
    found = sorted({" ".join(line.partition("#")[0].split()) for line in lines} - {"", INSTALL})
    return [command for command in found if not ELSEWHERE.match(command)]


def marks(command):
    return pytest.mark.gpu_code if "--gpus" in command else ()


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks(c), id=c) for c in commands()])
def test_commands_run(command, tmp_path):
    program, *arguments = shlex.split(command)
    assert program == "zerojax", f"say in ELSEWHERE what runs {command!r}"
    printed, _ = output(sys.executable, "-m", "zerojax", *arguments, cwd=tmp_path, MPLBACKEND="agg")
    assert printed
    for name in re.findall(r"\S+\.png", command):
        assert (tmp_path / name).stat().st_size > 5000


# -- what the text names: where, what, and whether it is there


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def targets_and_extras(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"`(?:PYTHON=\S+ )?make ([\w-]+)`", text):
        yield target, f"\n{target}:" in makefile
    for extra in re.findall(r"pip install '\.\[(\w+)\]'", text):
        yield extra, f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


@functools.cache
def anchors(page):
    """Those that GitHub gives the headings; of those alike, all but the first have a number."""
    slugs = []
    for heading in re.findall(r"^#+ (.+)", without_code(page), flags=re.MULTILINE):
        shown = re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading)
        slugs.append(re.sub(r"[^\w -]", "", shown.strip().lower()).replace(" ", "-"))
    before = [slugs[:at].count(slug) for at, slug in enumerate(slugs)]
    return [f"{slug}-{n}" if n else slug for slug, n in zip(slugs, before, strict=True)]


def links(page):
    pattern = r'(?:\]\((?!http)|\b(?:src|srcset)=")([^)"]+)'
    for link in re.findall(pattern, without_code(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        yield link, target.exists() and (not anchor or anchor in anchors(target))


def files(page):
    pattern = r"`((?:tests|examples|benchmarks|zerojax|docs)/[\w/.]+)`"
    for file in re.findall(pattern, without_code(page)):
        yield file, (ROOT / file).exists()


@functools.cache
def known_options():
    # Three of Flax's, a field of a user's state, two of JAX's, axes of a mesh, others'
    known = {"axis_name", "initial_carry", "wrt", "batch_stats", "policy", "implementation", "node"}
    known |= {"expert", "fsdp_size", "ignore_class"}
    modules = (zerojax, zerojax.aot, zerojax.checkpoint, zerojax.manual, zerojax.nnx, zerojax.run)
    modules += (zerojax.tools,)
    values = [getattr(module, name) for module in modules for name in dir(module)]
    for value in (one for one in values if getattr(one, "__module__", "").startswith("zerojax")):
        for function in (value, *vars(value).values()) if inspect.isclass(value) else (value,):
            if inspect.isfunction(function) or inspect.isclass(function):
                known |= set(inspect.signature(function).parameters)
    return known


def options(page):
    """`stage=` and its kind in a page's text; not in the first column of tables, which has others'
    options, nor after --set, which has the user's."""
    for line in re.sub(r"--set \S+=", "", without_code(page)).splitlines():
        ours = line.split("|", 2)[2] if line.startswith("|") else line
        for code in re.findall(r"`([^`]+)`", ours):
            for option in re.findall(r"\b([a-z]\w*)=", code):
                yield option, option in known_options()


@pytest.mark.parametrize(
    ("named", "pages"),
    [
        (targets_and_extras, PAGES),
        (links, [*PAGES, *OTHERS, *NOTEBOOKS]),
        (files, [*PAGES, *OTHERS, *NOTEBOOKS]),
        (options, PAGES),
    ],
)
def test_what_the_text_names_is_there(named, pages):
    claims = [(page.name, *each) for page in pages for each in named(page)]
    assert len(claims) > 5
    assert [(page, name) for page, name, there in claims if not there] == []


def test_compiling_for_gpus_needs_the_same_line_everywhere():
    """In the text; that of errors and of --help is what `_install_command` returns."""
    packages = json.dumps(INSTALL.replace("'", "").split()[2:])
    assert f"gpu-compile = {packages}\n" in (ROOT / "pyproject.toml").read_text()
    texts = {page.name: page.read_text() for page in (*PAGES, *NOTEBOOKS)}
    assert {"README.md", "gpus.md"} <= {name for name, text in texts.items() if INSTALL in text}
    for name, text in texts.items():
        others = text.replace(INSTALL, "")
        assert not re.search(r"cuda13|nvidia-(cuda|nvvm)|pip install .*gpu-compile", others), name
