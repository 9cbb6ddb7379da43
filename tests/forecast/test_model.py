"""The user's function and its config, as the command line calls it."""

import dataclasses
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

    def of_config(config):
        return config, config, config, "rng"
"""
CONFIGS = """
    import dataclasses, types

    @dataclasses.dataclass(frozen=True)
    class Optimizer:
        rate: float = 0.1

    class Model:
        layers = 2
        def heads(self):
            return 4

    class ConfigDict(types.SimpleNamespace):  # which is no dict
        def items(self):
            return vars(self).items()

    def get_config():
        nested = {"tokens": 8}
        free = ConfigDict(items_="x", depth=1)
        return types.SimpleNamespace(model=Model(), optimizer=Optimizer(), data=nested, free=free)
"""


@pytest.fixture
def forecast(run, module, monkeypatch):
    """Runs `zerojax forecast` on functions of train.py: what it passes on, or else its error."""
    module("train", TRAIN)
    module("configs", CONFIGS)
    pathlib.Path("c.json").write_text(json.dumps({"layers": 3, "width": {"of": 8, "in": 1}}))
    pathlib.Path("bad.json").write_text("layers: 3")
    pathlib.Path("list.json").write_text("[3]")
    calls = fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 30)))

    def forecast(name, config=None, *settings):
        given = ["--config", config] if config else []
        given += [word for setting in settings for word in ("--set", setting)]
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
        assert forecast("train:echo", None, f"n={text}")[0] == {"n": value}
    for text in ("n", "=1", "1n=2", "a..b=3", "a-b=3"):
        assert f"{text!r} is not name=value" in forecast("train:echo", None, text)


def test_settings_are_arguments(forecast):
    for name in ("train:model", "train.py:model", "./train.py:model"):
        assert forecast(name, None, "layers=3") == (("loss", 3), ("state", 256), "gpt", None)
    named = forecast(name, None, "layers=3", "width=8", "name=x")
    assert named == (("loss", 3), ("state", 8), "x", None)


def test_a_file_elsewhere_imports_what_is_beside_it(forecast, module, tmp_path, monkeypatch):
    module("beside", "WIDTH = 7")
    module("other", "import beside\ndef model():\n    return 1, 2, beside.WIDTH")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert forecast("../other.py:model") == (1, 2, 7, None)


def test_json_has_arguments_which_settings_change(forecast):
    loss, state, *_ = forecast("train:model", "c.json", "width.of=9")
    assert (loss, state) == (("loss", 3), ("state", {"of": 9, "in": 1}))
    loss, _, name, _ = forecast("train:model", "c.json", "layers=4", "name=x")
    assert (loss, name) == (("loss", 4), "x")


def test_a_python_config_is_passed_whole_and_settings_change_it(forecast):
    as_it_is, _, _, rng = forecast("train:of_config", "configs.py")
    assert (as_it_is.model.layers, as_it_is.optimizer.rate, rng) == (2, 0.1, "rng")
    settings = "model.layers=5", "optimizer.rate=1", "data.tokens=9", "free.depth=2"
    config, *_ = forecast("train:of_config", "configs.py", *settings)
    assert (config.model.layers, config.optimizer.rate, config.data) == (5, 1, {"tokens": 9})
    assert (config.free.depth, config.free.items_) == (2, "x")
    assert dataclasses.is_dataclass(config.optimizer), "frozen ones are replaced"


@pytest.mark.parametrize(
    ("name", "config", "settings", "message"),
    [
        ("train:model", None, (), "train:model(layers, width=256, *, name='gpt'): missing a requ"),
        ("train:model", None, ("layers=1", "depth=2"), "got an unexpected keyword argument 'dep"),
        ("train:model", None, ("data.x=2",), "--set data.x: there is no 'data' in dict. It has n"),
        ("train:of_config", "configs.py", ("free.x=1",), "ConfigDict. Its fields: items_, depth"),
        ("train:keyless", None, (), "train:keyless returned dict. Return (loss_fn, make_state, "),
        ("train.py:no", None, (), "train.py:no cannot be imported: module 'train' has no att"),
        ("train:model", "nosuch.json", (), "--config nosuch.json cannot be read: No such file"),
        ("train:model", "train.py", (), "--config train.py has no function get_config()."),
        ("train:model", "bad.json", (), "--config bad.json is not JSON: Expecting value"),
        ("train:model", "list.json", (), "--config list.json is a JSON list, not an object."),
        ("124m", None, ("depth=3",), "no 'depth' in Gpt. Its fields: layers, hidden, heads"),
    ],
)
def test_errors_name_the_argument_and_the_signature(forecast, name, config, settings, message):
    assert message in forecast(name, config, *settings)


# -- the guide's way from a training script to a forecast

THEIRS = """
    import flax.linen as nn, jax.numpy as jnp, optax
    from flax.training.train_state import TrainState

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.Conv(32, (3, 3))(x).reshape((x.shape[0], -1)))

    def create_train_state(rng, config):
        params = CNN().init(rng, jnp.ones([1, 28, 28, 1]))["params"]
        tx = optax.sgd(config.learning_rate, config.momentum)
        return TrainState.create(apply_fn=CNN().apply, params=params, tx=tx)
"""
CONFIG = """
    import types

    def get_config():
        return types.SimpleNamespace(learning_rate=0.1, momentum=0.9, batch_size=128)
"""


def test_the_guide_forecasts_a_training_script(run, module):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    (ours,) = re.findall(r"^```py\n(# cost.py.*?)^```", page, flags=re.M | re.S)
    (commands,) = re.findall(r"^```console\n(.*?)^```", page, flags=re.M | re.S)
    module("train", THEIRS)
    module("cost", ours)
    pathlib.Path("configs").mkdir()
    pathlib.Path("configs/default.py").write_text(textwrap.dedent(CONFIG))
    lines = commands.splitlines()
    assert {line.split()[2] for line in lines} == {"forecast", "audit"}
    for line in lines:
        with fakes.cpus_for_gpus():
            code, out, err = run(*shlex.split(line)[2:], "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
    assert found["memory"]["batch"] == (28 * 28 + 1) * 4 * 512 // 8
