"""The user's function, as the command line calls it."""

import json
import pathlib
import re
import shlex
import textwrap

import pytest

from tests.forecast import fakes

TRAIN = """
    def model(layers, width=256, *, name="gpt"):
        return ("loss", layers), ("state", width), name

    def echo(**settings):
        return settings, "state", "batch"

    def keyless(**settings):
        return settings

    def keyed():
        return "loss", "state", "batch", "rng"
"""


@pytest.fixture
def forecast(run, module, monkeypatch):
    """Runs `zerojax forecast` on functions of train.py: what it passes on, or else its error."""
    module("train", TRAIN)
    calls = fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 30)))

    def forecast(name, *settings):
        given = [word for setting in settings for word in ("--set", setting)]
        code, out, err = run("forecast", name, *given)
        if code:
            assert (code, out) == (2, "")
            return err
        args, _ = calls[-1]
        return args

    return forecast


def test_values_are_literals_or_else_strings(forecast):
    literals = {"12": 12, "-1e-3": -1e-3, "True": True, "None": None, "(1, 2)": (1, 2)}
    literals |= {"'12'": "12", "bfloat16": "bfloat16", "a=b": "a=b", "": ""}
    for text, value in literals.items():
        assert forecast("train:echo", f"n={text}")[0] == {"n": value}
    for text in ("n", "=1", "1n=2", "a.b=3", "a-b=3"):
        assert f"{text!r} is not name=value" in forecast("train:echo", text)


def test_settings_are_arguments(forecast):
    for name in ("train:model", "train.py:model", "./train.py:model"):
        assert forecast(name, "layers=3") == (("loss", 3), ("state", 256), "gpt", None)
    named = forecast(name, "layers=3", "width=8", "name=x", "width=9")
    assert named == (("loss", 3), ("state", 9), "x", None), "the last one counts"
    assert forecast("train:keyed")[3] == "rng"


def test_a_file_elsewhere_imports_what_is_beside_it(forecast, module, tmp_path, monkeypatch):
    module("beside", "WIDTH = 7")
    module("other", "import beside\ndef model():\n    return 1, 2, beside.WIDTH")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert forecast("../other.py:model") == (1, 2, 7, None)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("train:model", (), "train:model(layers, width=256, *, name='gpt'): missing a requ"),
        ("train:model", ("layers=1", "depth=2"), "got an unexpected keyword argument 'dep"),
        ("train:keyless", (), "train:keyless returned dict. Return (loss_fn, make_state, "),
        ("train.py:no", (), "train.py:no cannot be imported: module 'train' has no att"),
        ("124m", ("depth=3",), "no 'depth' in Gpt. Its fields: layers, hidden, heads"),
    ],
)
def test_errors_name_the_argument_and_the_signature(forecast, name, settings, message):
    assert message in forecast(name, *settings)


# -- the guide's way from a training script to a forecast

BEFORE = """
    import jax, jax.numpy as jnp, optax
    from flax.training.train_state import TrainState

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    def make_state():
        params = {"w": jnp.zeros((64, 8))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
"""


def test_the_guide_forecasts_a_training_script(run, module):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    (ours,) = re.findall(r"^```python\n# cost.py\n(.*?)^```", page, flags=re.M | re.S)
    blocks = re.findall(r"^```console\n(.*?)^```", page, flags=re.M | re.S)
    (commands,) = [block for block in blocks if "cost.py" in block]
    module("cost", textwrap.dedent(BEFORE) + ours)
    lines = commands.splitlines()
    assert {line.split()[2] for line in lines} == {"forecast", "audit"}
    for line in lines:
        with fakes.cpus_for_gpus():
            code, out, err = run(*shlex.split(line)[2:], "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
    assert found["memory"]["batch"] == (64 + 8) * 4 * 512 // 8
