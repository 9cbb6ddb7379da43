"""What `tests/same.py` lowers, with public names of zerojax alone: any revision's runs with it.

`tests/test_same.py` fails for an option of zerojax that no row of the table has.
"""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.support import lowering, nnx_models
from tests.support.models import (
    MODELS,
    OPTIMIZERS,
    Model,
    gpt_loss,
    gpt_params,
    label_params,
    odd_gpt,
)
from zerojax import manual

REFUSED = "refused, "  # what the text of a row begins with that raises an error

# -- models and optimizers beside those of the other tests


def wide(remat: bool) -> Model:
    """A GPT whose layers are large enough to go to host memory."""
    wrap = jax.checkpoint if remat else lambda f: f
    params = gpt_params(layers=4, dim=256, vocab=512, tokens=64)
    return Model(params, functools.partial(gpt_loss, wrap=wrap), jnp.zeros((64, 64), jnp.int32))


def lookup(_: bool) -> Model:
    """A table of which each device reads so little that rows travel."""
    params = {"table": jnp.zeros((2**16, 32)), "out": jnp.zeros((32, 8))}
    loss = lambda params, tokens: jnp.mean((params["table"][tokens] @ params["out"]) ** 2)
    return Model(params, loss, jnp.zeros((64, 64), jnp.int32))


def masked(_: bool) -> Model:
    def loss(params, batch):
        x, mask = batch
        return zerojax.mean((x @ params["w"]) ** 2, where=mask[:, None])

    return Model({"w": jnp.zeros((64, 16))}, loss, (jnp.zeros((64, 64)), jnp.zeros(64, bool)))


def layers(remat: bool) -> Model:
    """Layers in a Python loop."""

    def loss(params, x):
        layer = lambda x, p: x + jnp.tanh(x @ p["up"]) @ p["down"]
        for p in params["layers"]:
            x = (jax.checkpoint(layer) if remat else layer)(x, p)
        return jnp.mean(x**2)

    one = {"up": jnp.zeros((64, 128)), "down": jnp.zeros((128, 64))}
    return Model({"layers": [one] * 4}, loss, jnp.zeros((64, 64)))


def tensor(remat: bool, unroll: int = 1) -> Model:
    """Layers whose weights are annotated with an axis of the user's own."""
    wrap = jax.checkpoint if remat else lambda f: f
    box = lambda shape, *names: nn.Partitioned(jnp.zeros(shape), (None, *names))
    up, down = box((4, 256, 512), None, "tensor"), box((4, 512, 256), "tensor", None)

    def loss(params, batch):
        layer = wrap(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None))
        return jnp.mean(jax.lax.scan(layer, batch, nn.unbox(params), unroll=unroll)[0] ** 2)

    return Model({"up": up, "down": down}, loss, jnp.zeros((512, 256)))


def mixture(_: bool) -> Model:
    """Rows that are sorted by their experts, in a scan over layers."""

    def layer(x, p):
        rows, number = x.reshape(-1, 64), (x @ p["router"]).argmax(-1).reshape(-1)
        order, counts = number.argsort(), jnp.bincount(number, length=8)
        up = jnp.tanh(jax.lax.ragged_dot(rows[order], p["experts"]["up"], counts))
        down = jax.lax.ragged_dot(up, p["experts"]["down"], counts)
        return x + down[order.argsort()].reshape(x.shape), None

    loss = lambda params, x: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
    experts = {"up": jnp.zeros((2, 8, 64, 128)), "down": jnp.zeros((2, 8, 128, 64))}
    params = {"router": jnp.zeros((2, 64, 8)), "experts": experts}
    return Model(params, loss, jnp.zeros((16, 8, 64)))


def scaled(remat: bool) -> Model:
    fields = {"dynamic_scale": DynamicScale(), "skipped": jnp.zeros((), jnp.int32)}
    return dataclasses.replace(MODELS["mlp"](remat), fields=fields)


def module(_: bool) -> Model:
    """An Equinox model in place of the parameters."""
    model = equinox.nn.MLP(24, 8, 64, 2, key=jax.random.key(0))
    loss = lambda model, batch: jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
    return Model(model, loss, MODELS["mlp"](False).batch)


OWN_MODELS = {
    "odd": lambda remat: odd_gpt(64, remat), "wide": wide, "lookup": lookup, "masked": masked,
    "layers": layers,
    "tensor": tensor, "unrolled": functools.partial(tensor, unroll=2), "scaled": scaled,
    "module": module, "mixture": mixture,
}  # fmt: skip
OWN_OPTIMIZERS = {
    "frozen": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-3), "vector": optax.set_to_zero()}, label_params
    ),
    "wrapped": lambda: manual.narrow_moments(manual.master_weights(optax.adam(1e-3))),
}


class State(TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None
    skipped: Any = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration.

    Options that are functions are called where the row is lowered: what a revision does not know
    fails in this row alone. `...` is the row's own plan or optimizer.
    """

    model: str  # with "remat" behind its name, where it has it
    plan: dict[str, Any]  # options of `zerojax.plan`
    step: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of what is lowered
    lower: Callable[["Row"], str] = lowering.train
    optimizer: str = "adamw"
    refused: str = ""  # a pattern of the error, where it must raise one

    def tx(self) -> optax.GradientTransformation:
        return (OPTIMIZERS | OWN_OPTIMIZERS)[self.optimizer]()

    def state_and_model(self) -> tuple[Any, Model]:
        name, *remat = self.model.split()
        model, tx = (MODELS | OWN_MODELS)[name](bool(remat)), self.tx()
        if "tx" in self.plan:  # a state that does not carry it
            return (model.params, tx.init(model.params)), model
        if isinstance(model.params, equinox.Module):
            return zerojax.ModuleState.create(model.params, tx), model
        return State.create(apply_fn=None, params=model.params, tx=tx, **model.fields), model

    def nnx(self) -> tuple[Any, Any]:
        return nnx_models.make(tx=self.tx(), rate=0.1)

    def options(self, given: dict[str, Any], plan: Any = None) -> dict[str, Any]:
        own = {"plan": plan, "tx": self.tx()}
        values = {name: value() if callable(value) else value for name, value in given.items()}
        return {name: own[name] if value is ... else value for name, value in values.items()}

    def text(self) -> str:
        """Returns all that is compared: a program or an error, and the warnings before it."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                text = self.lower(self)
            except Exception as error:
                where = r"0x[0-9a-f]+|/\S+\.py(:\d+)*"
                text = REFUSED + re.sub(where, "…", f"{type(error).__name__}: {error}")
        return "\n".join([text, *(f"{each.category.__name__}: {each.message}" for each in caught)])

    def wrong(self, text: str) -> str:
        """Returns what is wrong where the row raises an error that it should not, or none."""
        is_refused = text.startswith(REFUSED)
        if is_refused == bool(self.refused) and re.search(self.refused, text):
            return ""
        wanted = f"an error of {self.refused!r}" if self.refused else "no error"
        return f"should have {wanted}, and is {text if is_refused else 'lowered'}"


# -- the table


def mesh_of(**sizes: int) -> Callable[[], Mesh]:
    """Of the first devices."""
    shape, names, types = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    return lambda: jax.make_mesh(shape, names, types, devices=jax.devices()[: np.prod(shape)])


def precision(**dtypes: Any) -> Callable[[], zerojax.Precision]:
    return lambda: zerojax.Precision(**dtypes)


NODES = {"mesh": lambda: zerojax.mesh(node=2, gpu=4)}
RACKS = {"mesh": lambda: zerojax.mesh(rack=2, node=2, gpu=2)}
BOTH = NODES | {"axis": ("node", "gpu")}
HPZ = NODES | {"groups": {"params": "gpu", "grads": "gpu", "opt_state": ("node", "gpu")}}
ROWS = {
    # models and stages
    "mlp, stage 0": Row("mlp", dict(stage=0)),
    "mlp, stage 1": Row("mlp remat", dict(stage=1, mesh=mesh_of(data=4))),
    "gpt, stage 1": Row("gpt", dict(stage=1), dict(donate=False)),
    "gpt, stage 2": Row("gpt remat", dict(stage=2), dict(prefetch=1)),
    "gpt, stage 3": Row("gpt remat", dict(stage=3), dict(prefetch=0)),
    "gpt, prefetched": Row("gpt remat", dict(stage=3), dict(prefetch=1)),
    "gpt, kept": Row("gpt", dict(stage=3), dict(prefetch=1, regather=False)),
    "gpt, layers kept": Row("gpt remat", dict(stage=3), dict(keep_layers=2)),
    "gpt, one device": Row("gpt", dict(stage=3, mesh=mesh_of(data=1))),
    "transformer": Row("transformer remat", dict(stage=3, mesh=mesh_of(data=2))),
    "convnet": Row("convnet", dict(stage=2), dict(mutable=("batch_stats",))),
    "lookup": Row("lookup", dict(stage=3)),
    "lookup, nodes": Row("lookup", dict(stage=3) | BOTH, dict(accumulate=2)),
    "lookup, time-major": Row("lookup", dict(stage=2), dict(batch_specs=P(None, "data"))),
    "masked mean": Row("masked", dict(stage=2), dict(accumulate=2)),
    "equinox": Row("module", dict(stage=3)),
    "nnx": Row("", dict(stage=3), dict(accumulate=2), lowering.nnx_train),
    "nnx, evaluated": Row("", dict(stage=1), {}, lowering.nnx_evaluate),
    # what is sharded
    "padded, stage 1": Row("odd", dict(stage=1), optimizer="lamb"),
    "padded, stage 3": Row("odd remat", dict(stage=3), dict(prefetch=1, accumulate=2)),
    "not padded": Row("odd", dict(stage=3, pad=False, min_shard_size=2000)),
    "overrides": Row(
        "gpt", dict(stacked="blocks/(qkv|proj)", overrides={"embed": P(None, "data"), "pos": P()})
    ),
    "frozen": Row("gpt", dict(stage=3), optimizer="frozen"),
    "bare state": Row("mlp", dict(stage=3, tx=...), dict(plan=..., tx=...)),
    # meshes and groups
    "nodes": Row("gpt remat", BOTH, dict(prefetch=1)),
    "nodes, regathered": Row("gpt remat", BOTH, dict(regather="gpu")),
    "hpz": Row("gpt remat", HPZ, dict(prefetch=1, accumulate=2)),
    "slow axis": Row("mlp", dict(stage=1, groups={"grads": "node"}) | BOTH),
    "sequences": Row(
        "gpt remat", dict(sequence="sequence", mesh=mesh_of(data=2, sequence=2))
    ),
    "experts": Row("mixture", dict(
        experts=lambda: zerojax.Experts("expert", "experts", room=1.5),
        mesh=mesh_of(data=2, expert=2),
    )),
    "racks": Row("odd", dict(groups={"params": "gpu", "grads": ("node", "gpu")}) | RACKS),
    "python loop": Row("layers", dict(stage=3), dict(roll=True)),
    "python loop, remat": Row("layers remat", dict(stage=3)),
    "tensor": Row("tensor remat", dict(mesh=mesh_of(data=4, tensor=2))),
    "tensor, activations": Row(
        "tensor remat", dict(mesh=mesh_of(data=4, tensor=2)), dict(activations=("host", "tensor"))
    ),
    # microbatches
    "accumulated, stage 1": Row("gpt", dict(stage=1), dict(accumulate=4)),
    "accumulated, stage 3": Row("transformer", dict(stage=3), dict(accumulate=4)),
    "layers first": Row("gpt remat", dict(stage=3), dict(accumulate=2, order="layers", prefetch=1)),
    # precision
    "bfloat16": Row(
        "gpt remat", dict(stage=2), dict(precision=precision(compute="bfloat16", reduce="float32"))
    ),
    "codes": Row(
        "wide remat", BOTH, dict(precision=precision(reduce="int8", gather="int8"), prefetch=1)
    ),
    "codes, some": Row("gpt", dict(groups={"params": "gpu"}) | NODES, dict(
        precision=lambda: zerojax.Precision(
            gather={"qkv": zerojax.QuantizedWire("float8_e4m3fn", block=64), "up": "bfloat16"},
            reduce=zerojax.QuantizedWire("int4"),
        )
    )),
    "codes, slow axis": Row(
        "wide", dict(stage=1, groups={"grads": "node"}, precision=precision(reduce="int8")) | BOTH
    ),
    "master weights": Row(
        "gpt", dict(stage=1, precision=precision(param="bfloat16", master="float32"))
    ),
    "narrow moments": Row("odd", dict(precision=precision(moments="bfloat16")), dict(accumulate=2)),
    "wrapped optimizer": Row("mlp", dict(stage=2), optimizer="wrapped"),
    "float16": Row("scaled", dict(stage=2), optimizer="momentum"),
    # optimizers
    "adafactor": Row("gpt", dict(stage=3), optimizer="adafactor"),
    "muon": Row("gpt", dict(stage=2), optimizer="muon"),
    "skipped": Row("mlp", dict(stage=3), dict(skip_nonfinite=True), optimizer="clip_schedule"),
    # updates in backward, host memory
    "in backward": Row("gpt remat", dict(stage=3), dict(update="backward", prefetch=1)),
    "in backward, stage 1": Row("gpt", dict(stage=1), dict(update="backward")),
    "offloaded": Row("wide remat", dict(stage=2, offload="opt_state"), optimizer="lion"),
    "offloaded, both": Row(
        "wide remat", dict(offload=lambda: zerojax.Offload(0.5, 0.7, min_bytes=0)),
        dict(activations="host", update="backward", prefetch=1),
    ),
    "offloaded, padded": Row(
        "odd", dict(stage=1, offload=lambda: zerojax.Offload(min_bytes=256, max_bytes=2**14)),
        dict(accumulate=2),
    ),
    # beside training steps
    "evaluated": Row("convnet", dict(stage=3), dict(
        plan=..., mutable=("batch_stats",), precision=precision(compute="bfloat16"),
        batch_specs=P("data"),
    ), lowering.evaluate),
    "gradients": Row("transformer", dict(stage=2), dict(has_aux=True), lowering.grads),
    "gradients, python loop": Row("layers", dict(stage=3), dict(roll=True), lowering.grads),
    "gradients, layers kept": Row("gpt", dict(stage=3), dict(keep_layers=2), lowering.grads),
    "gradients, layers first": Row("wide remat", dict(stage=3), dict(
        accumulate=2, order="layers", prefetch=1, precision=precision(compute="bfloat16"),
        activations="host",
    ), lowering.grads),
    "gradients, kept": Row(
        "lookup", BOTH, dict(regather="gpu", batch_specs=P(None, ("node", "gpu"))), lowering.grads
    ),
    "born sharded": Row("odd", dict(stage=3), {}, lowering.born),
    "plan": Row("odd", HPZ, {}, lowering.plan),
    "plan, offloaded": Row("wide", dict(offload=("opt_state", "params")), {}, lowering.plan),
    "plan, with a warning": Row("mlp", dict(offload="opt_state"), {}, lowering.plan),
    # what must be refused
    "idle axis": Row("mlp", dict(mesh=mesh_of(data=4, tensor=2)), refused="nothing is sharded"),
    "odd batch": Row("mlp", dict(stage=3), dict(accumulate=3), refused="divide"),
    "needs all": Row("gpt", {}, dict(update="backward", accumulate=2), refused="all gradients"),
    "an option of XLA": Row(
        "mlp", {}, dict(compiler_options={"xla_of_no_name": 1}), lowering.compiled,
        refused="No such compile option",
    ),
}  # fmt: skip


GPUS = {"mesh": lambda: zerojax.aot.mesh("8xH100")}
HOSTS = {"mesh": lambda: zerojax.aot.mesh("16xH100", (2, 8), ("node", "gpu"))}
GPU_ROWS = {
    "GPUs": Row("gpt remat", GPUS, {}, lowering.train_on_gpus),
    "GPUs, padded": Row("odd remat", GPUS, dict(accumulate=2), lowering.train_on_gpus),
    "GPUs, unrolled": Row("unrolled remat", GPUS, dict(prefetch=0), lowering.train_on_gpus),
    "GPUs, codes": Row(
        "wide remat", HPZ | HOSTS, dict(precision=precision(reduce="int8")), lowering.train_on_gpus
    ),
    "GPUs, offloaded": Row(
        "wide remat", dict(offload=("opt_state", "params")) | GPUS, {}, lowering.train_on_gpus
    ),
}  # fmt: skip


def rows() -> dict[str, Row]:
    """Returns the rows that this machine can lower."""
    try:
        zerojax.aot._check_packages()
    except ModuleNotFoundError:
        return ROWS
    return ROWS | GPU_ROWS


def main(pattern: str, path: str) -> None:
    """Writes the texts of some rows, and what is wrong with them."""
    table = rows()
    texts = {name: row.text() for name, row in table.items() if re.search(pattern, name)}
    wrong = {name: why for name, text in texts.items() if (why := table[name].wrong(text))}
    left_out = len(ROWS | GPU_ROWS) - len(table)
    result = {"library": zerojax.__file__, "texts": texts, "wrong": wrong, "left_out": left_out}
    pathlib.Path(path).write_text(json.dumps(result | {"names": list(table)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
