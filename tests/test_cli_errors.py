"""Bad input of the command line: one line with a remedy, and exit code 2."""

import contextlib

import pytest

from tests.forecast import fakes
from tests.support import stored

STEP = str(stored.HERE / "step3-8xH100-jax0.12.hlo")
G8 = ("--gpus", "8xH100")
NAMED = ("mymodel:model", *G8, "--axis")
BAD = {
    "unknown preset": (("forecast", "3x"), "no preset '3x'. Name one of 124m"),
    "failing": (("audit", "mymodel:failing"), "no data at all"),
    "no file": (("forecast", "absent.py:model"), "absent.py. Name one seen from this directory."),
    "unknown argument": (
        ("forecast", "theirs:of", "--set", "rows=4"),
        "of(layers=2, *, width=4): got an unexpected keyword argument 'rows'. Pass its",
    ),
    "experts of no axis": (
        ("forecast", "mymodel:model", *G8, "--experts", "expert=w"),
        "'expert' of experts= is no axis of the mesh, whose axes are ('data',). Name one of them, "
        "or pass a mesh that has it: mesh=zerojax.mesh(data=-1, expert=2), to a command --mesh "
        "data=-1,expert=2.",
    ),
    "syntax": (("forecast", "broken:model"), "broken:model cannot be imported: "),
    "theirs": (("forecast", "theirs:f"), "KeyError: 'missing' ("),
    "chosen step": (("forecast", "mymodel:step", "--choose"), "To --choose, return (loss_fn, mak"),
    "untraceable": (("forecast", "mymodel:untraceable", "--stages", "3"), "oncret"),
    "one axis": (("forecast", *NAMED, "batch", "--groups", "params=gpu"), "must be two names: of"),
    "what to keep": (("forecast", "124m", "--remat", "q+k"), "none, dots, full, or"),
    "three axes": (("forecast", *NAMED, "a,b,c"), "must be the name of the mesh axis over all"),
    "one twice": (("forecast", *NAMED, "a,a"), "two names: of the hosts, and of the GPUs of each"),
    "microbatches": (("forecast", "124m", "--accumulate", "4", "8"), "divide into --accumulate 8"),
    "options of HLO": (
        ("audit", STEP, "--no-pad", "--prefetch", "0", "--regather", "false", "--keep-layers", "1"),
        "is compiled already. Leave out --keep-layers, --no-pad, --prefetch, --regather.",
    ),
    "chosen and told": (
        ("forecast", "124m", *["--choose", "--offload", "params", "--reduce", "int8", "--no-pad"]),
        "--choose takes no --offload, --reduce: it finds the fastest way itself. Leave",
    ),
    "what choose has not": (
        ("forecast", "124m", *["--choose", "--keep-layers", "4", "--no-pad"]),
        "--choose takes no --keep-layers: it finds",
    ),
    "binary": (("audit", "binary.hlo"), "binary.hlo cannot be read as HLO (not text). Name a file"),
    "too many": (("forecast", "124m", "--gpus", "10000000xH100"), "more than 100,000 GPUs, and no"),
    "no picture": (("audit", "124m", "--plot", "x.hlo"), "x.hlo does not name a picture file"),
    "plot nowhere": (("audit", "124m", "--plot", "no/x.png"), "there is no directory for no/x.png"),
    "damaged": (("audit", "damaged.hlo"), "this is not the text of an HLO module: it starts"),
    "set of HLO": (("audit", STEP, "--set", "n=1"), "is compiled already. Leave out --set."),
    "links of none": (("audit", STEP, "--network", "9"), "change a GPU's links. Name the GPU, t"),
    "16 bits": (("forecast", "124m", "--compute", "float32"), "'124m' computes in the 16 bits of"),
    "study nowhere": (("study", "124m", *G8, "--plot", "no/x.png"), "is no directory for no/"),
    "plot of CPU": (("audit", STEP, "--plot", "x.png"), "no times to plot"),
}

# Found where the step is made for GPUs.
COMPILED = ("untraceable", "experts of no axis")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_line_with_a_remedy(case, run, module, tmp_path):
    module("mymodel", fakes.MODEL)
    module("broken", "def model(:\n")
    module("theirs", "def f():\n    return {}['missing']\n\ndef of(layers=2, *, width=4): pass\n")
    (tmp_path / "damaged.hlo").write_text("%f (a: f32[]) -> f32[] {\n")
    (tmp_path / "binary.hlo").write_bytes(bytes(range(128, 256)))
    arguments, message = BAD[case]
    with fakes.cpus_for_gpus() if case in COMPILED else contextlib.nullcontext():
        code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zerojax: ") and message in err
    assert err.count("\n") == 1 and "Traceback" not in err
    assert case != "theirs" or "theirs.py:2)" in err


USAGE = """
table --stages 4
table --devices 0
table --params 0
forecast
forecast 124m --rows 0
forecast 124m --network 0
forecast 124m --groups params=gpu,params=node
forecast 124m --regather ,
forecast 124m --update x
"""


def test_bad_usage(run):
    for arguments in USAGE.splitlines():
        code, out, err = run(*arguments.split())
        assert (code, out) == (2, "") and err.startswith("usage: zerojax "), arguments
        assert ": error: " in err and err.count("\n") == 2, "the usage, then the error"


def test_tracebacks_on_request(run, monkeypatch):
    monkeypatch.setenv("ZEROJAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no preset '3x'"):
        run("forecast", "3x")
