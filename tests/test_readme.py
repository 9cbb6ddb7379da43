"""Every block of the README and of the guide runs: Python, in order, and commands."""

import functools
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest

import zerojax

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [
    *PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]  # fmt: skip
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}

# Commands that other parts of CI run: in which file, and how they are written there.
XLA_FLAG = "XLA_FLAGS=--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=3"
GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer="
INSTALL = zerojax.aot.install_command()
CHOOSE = "forecast 124m --gpus 16xH100 --network 12.5 --choose"
STUDY = "study 60b --gpus 64xH100 128xH100 400xH100 --stages 3 --out study.json --plot study.png"
ELSEWHERE = {
    "make demo": (".ci/run", 'make -C "$clone" demo PYTHON="$python"\n'),
    "make test": (".ci/run", 'make -C "$clone" test PYTHON="$python"\n'),
    INSTALL: (
        "Makefile",
        f"{INSTALL.replace('install', 'install --quiet --disable-pip-version-check')}\n",
    ),
    f"export {XLA_FLAG}": ("tests/forecast/test_network.py", f'"{XLA_FLAG}"\n'),
    f"export {GRAPHS}": ("zerojax/_audit/trace.py", f"{GRAPHS} (nothing after it)"),
    # Take minutes, and are given there to what compiles nothing.
    f"zerojax {CHOOSE}": ("tests/test_cli.py", f'"{CHOOSE} --axis batch"'),
    f"zerojax {STUDY}": ("tests/test_cli.py", f'"{STUDY}"'),
}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(code, directory):
    script = directory / "page.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=ENV,
        cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_is_a_program(tmp_path):
    two_lines, program, *rest = blocks(README, "python")
    printed = run("\n".join([program, "data = [batch] * 2", two_lines, *rest]), tmp_path)
    assert re.search(r"loss 0\.\d+, w1 \(8, 512\)", printed), printed
    assert "ZeRO stage 3 over data=8" in printed


@pytest.mark.parametrize(
    "page", [p for p in PAGES[1:] if blocks(p, "python")], ids=lambda p: p.stem
)
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("default")  # as for a user
def test_pages_continue_from_the_readmes_program(page, alone, tmp_path, monkeypatch):
    """Usually in this process, which has imported and compiled much of what the pages share."""
    code = "\n".join(blocks(page, "python"))
    is_whole = DEVICES in code  # a program of its own
    code = code if is_whole else f"{blocks(README, 'python')[1]}\n{code}"
    if alone or is_whole:
        run(code, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    before = dict(jax.config.values)
    exec(compile(code.replace(DEVICES, ""), page.name, "exec"), {"__name__": "__main__"})
    assert dict(jax.config.values) == before, "it would change the tests that follow"


@pytest.mark.gpu_code
def test_the_forecasts_on_the_pages_run(tmp_path):
    (code,) = [block for block in blocks(ROOT / "docs/gpus.md", "py") if "forecast(" in block]
    (nnx,) = [block for block in blocks(ROOT / "docs/models.md", "python") if "nnx_step =" in block]
    (of_nnx,) = blocks(ROOT / "docs/models.md", "py")
    printed = run("\n".join([blocks(README, "python")[1], code, nnx, of_nnx]), tmp_path)
    assert printed.count("8xH100, ") == 3 and "Fastest that fits" in printed, printed
    assert printed.count("all-gather") > 0, printed


FLAG = " + reduce_scatter_combine_threshold_bytes=1"
MEASURED = {
    "zerojax, stage 3": "stage 3",
    "Flax nnx, annotated": "flax nnx, blocks",
    "Flax nnx, annotated, + flag": "flax nnx, blocks" + FLAG,
    "Flax linen, annotated, + flag": "flax linen, blocks" + FLAG,
    "plain JAX, annotated, + flag": "annotations, blocks" + FLAG,
    "plain JAX, by hand in a `shard_map`, + flag": "by hand" + FLAG,
    "MaxText's own step, + flag": "MaxText" + FLAG,
    "Levanter's own step, + flag": "Levanter" + FLAG,
    "plain JAX, only parameters and batch annotated": "annotations, nothing",
    "zerojax, stages 1 and 2": "stage 2",
}


@pytest.mark.parametrize("program", MEASURED)
def test_the_readmes_figures_are_those_of_the_benchmark(program):
    files = (ROOT / "benchmarks").glob("rivals_*.json")
    files = [ROOT / "benchmarks" / "compiled_jax0.12.0.json", *files]
    stored = [row for file in files for row in json.loads(file.read_text())["rows"]]
    (row,) = (r for r in stored if r["row"] == f"7.5b 64xH100 x4 full: {MEASURED[program]}")
    sent = f"{row['wire_gib']:.1f}" if row["wire_gib"] < 100 else f"{row['wire_gib']:.0f}"
    cells = (program, f"{row['peak_gib']:.1f}", sent, f"{row['step_ms']:.0f}",
             f"{row['exposed_ms']:.0f}")  # fmt: skip
    assert f"| {' | '.join(cells)} |" in README.read_text()


def test_the_readmes_step_times_are_those_of_the_benchmark():
    stored = json.loads((ROOT / "benchmarks" / "step_time_cpu.json").read_text())
    times = {row["step"]: row["time"] for row in stored["rows"] if row["model"] == "GPT"}
    text = " ".join(README.read_text().split())
    assert f"takes {times['zerojax stage 3']:.2f} of the time" in text
    assert f"FSDP by annotations ({times['annotations, blocks']:.2f})" in text
    assert f"by hand in a `shard_map` ({times['by hand']:.2f}," in text


def test_the_readmes_compile_times_are_those_of_the_benchmarks():
    text = " ".join(README.read_text().split())
    stored = json.loads((ROOT / "benchmarks" / "compile_time.json").read_text())
    times = {row["row"].rpartition(": ")[2]: row["time"] for row in stored["rows"]}
    ours, flax = times["stage 3"], times["flax nnx, blocks"]
    assert f"A 7.5B GPT takes {ours:.1f} times as long to compile" in text
    assert f"{ours / flax:.1f} times as long as with FSDP in Flax" in text
    rows = json.loads((ROOT / "benchmarks" / "first_step_cpu.json").read_text())["rows"]
    first = {who: {r["program"]: r["time"] for r in rows if r["step"] == who}
             for who in ("annotations", "zerojax stage 3")}  # fmt: skip
    ours, fsdp = first["zerojax stage 3"], first["annotations"]
    assert f"took {min(ours.values()):.2f} to {max(ours.values()):.2f} times" in text
    ratios = [ours[program] / fsdp[program] for program in ours]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long as FSDP by annotations" in text


def commands():
    text = "\n".join(block for page in PAGES for block in blocks(page, "bash"))
    lines = text.replace("\\\n", "").splitlines()
    return sorted({" ".join(line.partition("#")[0].split()) for line in lines} - {""})


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path):
    if command in ELSEWHERE:
        file, written = ELSEWHERE[command]
        assert written in (ROOT / file).read_text()
        return
    program, *arguments = shlex.split(command)
    assert program == "zerojax", f"say in ELSEWHERE what runs {command!r}"
    if "--gpus" in arguments and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("make gpu-compile")
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", *arguments], capture_output=True, text=True, check=False,
        env=ENV, cwd=tmp_path,
    )  # fmt: skip
    fine = (0, 1) if arguments[0] == "doctor" else (0,)  # it may well find something
    assert done.returncode in fine, done.stderr
    assert done.stdout
    for name in re.findall(r"\S+\.png", command):
        assert (tmp_path / name).stat().st_size > 5000


TARGET = r"`(?:PYTHON=\S+ )?make ([\w-]+)`"
EXTRA = r"pip install '\.\[(\w+)\]'"
LINK = r"\]\((?!http)([^)]+)\)"
FILE = r"`((?:tests|examples|benchmarks|zerojax|docs)/[\w/.]+)`"


def test_the_pages_have_some_of_all_that_is_checked():
    text = "\n".join(page.read_text() for page in PAGES)
    assert [p for p in (TARGET, EXTRA, LINK, FILE) if len(re.findall(p, text)) < 2] == []
    assert sum(len(list(options_named(page))) for page in PAGES) > 20
    assert set(ELSEWHERE) <= set(commands())


def test_compiling_for_gpus_needs_the_same_line_everywhere():
    """In the text; that of errors and of --help is what `install_command` returns."""
    line = zerojax.aot.install_command()
    assert f"pip install --quiet --disable-pip-version-check {line.split('install ')[1]}\n" in (
        (ROOT / "Makefile").read_text()
    )
    packages = line.replace("'", "").split()[2:]
    assert f"gpu-compile = {json.dumps(packages)}\n" in (ROOT / "pyproject.toml").read_text()
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    named = {page.name: page.read_text() for page in (*PAGES, *notebooks)}
    told = [name for name, text in named.items() if line in text]
    assert {"README.md", "gpus.md"} <= set(told)
    for name in ("README.md", "gpus.md"):  # where there is no GPU, JAX still looks for one
        assert "JAX_PLATFORMS=cpu" in named[name].split(line)[1][:500], name
    assert {name for name in told if name.endswith("ipynb")} == {
        "02_what_xla_compiled.ipynb", "03_know_before_you_rent.ipynb"
    }  # fmt: skip
    for name, text in named.items():
        others = text.replace(line, "")
        assert not re.search(r"cuda13|nvidia-(cuda|nvvm)|pip install .*gpu-compile", others), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_in_the_text_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    text = page.read_text()
    for target in re.findall(TARGET, text):
        assert f"\n{target}:" in makefile, target
    for extra in re.findall(EXTRA, text):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), extra


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page):
    """Those that GitHub gives the headings; of those alike, all but the first have a number."""
    slugs = []
    for heading in re.findall(r"^#+ (.+)", without_code(page), flags=re.MULTILINE):
        shown = re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading)
        slugs.append(re.sub(r"[^\w -]", "", shown.strip().lower()).replace(" ", "-"))
    before = [slugs[:at].count(slug) for at, slug in enumerate(slugs)]
    return [f"{slug}-{n}" if n else slug for slug, n in zip(slugs, before, strict=True)]


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = without_code(page)
    for link in re.findall(LINK, text) + re.findall(r'\b(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for file in re.findall(FILE, text):
        assert (ROOT / file).exists(), file


def options_named(page):
    """`stage=` and its kind in a page's text; not in the first column of tables, which has others'
    options, nor after --set, which has the user's."""
    text = re.sub(r"```.*?```|--set \S+=", "", page.read_text(), flags=re.DOTALL)
    for line in text.splitlines():
        ours = line.split("|", 2)[2] if line.startswith("|") else line
        for code in re.findall(r"`([^`]+)`", ours):
            yield from re.findall(r"\b([a-z]\w*)=", code)


def test_options_that_the_text_names_exist():
    # Two of Flax's, a field of a user's state, two of JAX's, an axis of a mesh
    known = {"axis_name", "initial_carry", "batch_stats", "policy", "implementation", "node"}
    for name in dir(zerojax):
        value = getattr(zerojax, name)
        for function in (value, *vars(value).values()) if inspect.isclass(value) else (value,):
            if inspect.isfunction(function) or inspect.isclass(function):
                known |= set(inspect.signature(function).parameters)
    for page in PAGES:
        unknown = set(options_named(page)) - known
        assert not unknown, f"{page.name}: {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_is_not_wider_than_the_site_shows(page):
    code = [line for kind in ("python", "py", "bash", "console") for block in blocks(page, kind)
            for line in block.splitlines()]  # fmt: skip
    assert [line for line in code if len(line) > 100] == []
