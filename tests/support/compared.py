"""Compares rows of `space.py` with one device, for `tests/test_pairs.py` and `tests/fuzz.py`."""

import dataclasses
import math
import re
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import zerojax
import zerojax.nnx
from tests.support.schedules import scheduled
from tests.support.space import SEVEN, Row, refusal_of, settings
from tests.support.trajectory import (
    OPTIMIZERS,
    RATE,
    STEPS,
    End,
    batch_of,
    key_of,
    some_frozen,
    start,
    subject_of,
    trajectory,
)
from zerojax._plan import encodings


class State(TrainState):
    stats: Any = None


@struct.dataclass
class Modules(zerojax.ModuleState):
    stats: Any = None


KINDS = ("opt_state", "grads", "params")


def mesh_of(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def sequences_of(row: Row) -> zerojax.Sequences | None:
    """The features of the MLP stand for tokens, which its weights mix. A mixture sorts tokens."""
    limit = {"mlp": 0.5, "mixture": math.inf}.get(row.model)
    limit = {"most_gathered": limit} if limit else {}
    return zerojax.Sequences(row.tokens, **limit) if row.tokens else None


def placing(row: Row) -> dict[str, Any]:
    """What `shard_train_state` is given."""
    axes = tuple(row.sizes)
    shared = {
        kind: tuple(axis for axis in axes if min(row.kinds[axis], row.stage) > at)
        for at, kind in enumerate(KINDS)
    }
    rows = tuple(axis for axis in axes if axis not in (row.tokens, row.apart))
    where = {"groups": shared} if "/" in row.layout else {"axis": rows or None}
    offload = zerojax.Offload(**{k: k in row.offload for k in ("opt_state", "params")}, min_bytes=0)
    return {
        "stage": row.stage,
        "mesh": mesh_of(row.sizes, AxisType.Explicit if row.explicit else AxisType.Auto),
        "sequence": sequences_of(row),
        "experts": {row.apart: "experts"} if row.apart else None,
        "pad": row.shapes != "whole",
        "precision": zerojax.Precision(**row.types) if row.types else None,
        "offload": offload if row.offload else None,
        **where,
    }


def stepping(row: Row) -> dict[str, Any]:
    """What `train_step` is given."""
    names = "accumulate order prefetch keep_layers roll update activations donate"
    options = {name: getattr(row, name) for name in names.split()}
    near = [axis for axis, kinds in row.kinds.items() if kinds == 3] or list(row.sizes)
    return options | {
        "regather": near[-1] if row.regather == "near" else row.regather,
        "skip_nonfinite": row.skip,
    }


def loss_of(row: Row) -> Any:
    """The loss, with as many arguments as the row needs."""
    subject, wrap = subject_of(row), jax.checkpoint if row.remat else lambda f: f

    def loss(model, batch, *key, **fields):
        held = {"mean": model.mean[...], "seen": model.seen[...]} if row.model == "nnx" else None
        stats = fields.get("stats", held or subject.stats)
        losses, new, scale = subject.apply(model, stats, batch["x"], *key or [None], RATE, wrap)
        losses = losses * batch["gain"]
        value = zerojax.mean(losses, where=batch["mask"]) if row.masked else losses.mean()
        if row.fields and row.model == "nnx":
            nnx.update(model, new)
        return value, {"scale": scale} | ({"stats": new} if fields else {})

    return loss


def state_at(row: Row, end: End) -> Any:
    """A state on one device that has been trained so far; of nnx, a model and its optimizer."""
    subject, tx = subject_of(row), OPTIMIZERS[row.optimizer]()
    params = end.params
    if row.packed:  # codes of what had been in codes may be others
        stays = jax.tree.map("frozen".__eq__, some_frozen(params))
        params = jax.tree.map(lambda s, a, b: a if s else b, stays, subject.params, params)
    model = subject.model_of(params)
    if row.model == "nnx":
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(model, end.stats)
        state = zerojax.nnx.state(model, optimizer)
        zerojax.nnx.update(model, optimizer, state.replace(opt_state=end.opt_state))
        if row.packed:
            zerojax.nnx.quantize(model, optimizer, row.packed)
        return model, optimizer
    fields = {"stats": end.stats} if row.fields else {}
    if row.model == "equinox":  # whose arrays of numpy are constants
        state = Modules.create(jax.tree.map(jnp.asarray, model), tx, **fields)
    else:
        state = State.create(apply_fn=None, params=model, tx=tx, **fields)
    state = state.replace(opt_state=end.opt_state)
    return zerojax.quantize(state, row.packed) if row.packed else state


class Training:
    """A placed state and its step, the same to use for nnx's objects and for states."""

    def __init__(self, row: Row, source: Any) -> None:
        self.is_nnx, loss, options = row.model == "nnx", loss_of(row), stepping(row)
        if self.is_nnx:
            source = (source,) if callable(source) else source
            self.objects = zerojax.nnx.shard(*source, **placing(row))
            self.step = zerojax.nnx.train_step(loss, **scheduled(options))
        else:
            self.state = zerojax.shard_train_state(source, **placing(row))
            mutable = ("stats",) if row.fields else ()
            self.step = zerojax.train_step(loss, mutable=mutable, **scheduled(options))
        if row.replayed:
            self.step = zerojax.tools.replay(self.step, every=row.replayed)
        self.compiled = self.step._functional if self.is_nnx else self.step

    def get(self) -> Any:
        return zerojax.nnx.state(*self.objects) if self.is_nnx else self.state

    def put(self, state: Any) -> None:
        if self.is_nnx:
            zerojax.nnx.update(*self.objects, state)
        else:
            self.state = state

    def advance(self, batch: Any, *key: jax.Array) -> dict[str, Any]:
        if self.is_nnx:
            metrics = jax.block_until_ready(self.step(*self.objects, batch, *key))
        else:
            self.state, metrics = jax.block_until_ready(self.step(self.state, batch, *key))
        return metrics | metrics["aux"]

    def call(self, batch: Any, *key: jax.Array) -> tuple[Any, ...]:
        """The step of states, and what it is called with."""
        if self.is_nnx:
            return self.step.pure(*self.objects, batch, *key)
        return self.step, self.state, batch, *key


# Where the checkpoint of a row is made that begins with one.
ELSEWHERE = {
    "saved flat": {"layout": "data=8", "stage": 1, "offload": ()},
    "saved in groups": {
        "layout": "node=2/1 gpu=2/3",
        "stage": 3,
        "offload": ("opt_state", "params"),
    },
    "saved wide": {"layout": "data=8", "stage": 2, "precision": ""},
    "saved in codes": {"layout": "node=2/1 gpu=2/3", "stage": 3, "precision": SEVEN},
}


def started(row: Row, ends: list[End]) -> tuple[Training, int]:
    """A row's training, and how many steps there were before it: one on one device, or none."""
    if row.source == "function":
        return Training(row, lambda: state_at(row, ends[0])), 0
    if row.source == "arrays":
        return Training(row, state_at(row, ends[1])), 1
    pad = {"whole": "padded", "padded": "whole", "even": "even"}[row.shapes]
    other = dataclasses.replace(row, shapes=pad, **ELSEWHERE[row.source])
    if refusal_of(dataclasses.asdict(other)):
        other = dataclasses.replace(other, experts="")
    training = Training(row, state_at(row, ends[0]))
    with tempfile.TemporaryDirectory() as directory:
        zerojax.save(f"{directory}/state", Training(other, state_at(row, ends[1])).get())
        cast = other.precision != row.precision  # what is frozen, and has no master
        training.put(zerojax.restore(f"{directory}/state", like=training.get(), cast=cast))
    return training, 1


@dataclasses.dataclass
class Run:
    """A row's training after its steps, the first of which was this one."""

    training: Training
    first: int
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    gone: list[bool] = dataclasses.field(default_factory=list)  # arrays of the state before


def run(row: Row) -> Run:
    # What layers keep is small here.
    with mock.patch("zerojax._features.activations.LEAST_MOVED", 0):
        training, first = started(row, trajectory(row))
        found = Run(training, first)
        for step in range(first, STEPS):
            old = jax.tree.leaves(training.get())
            metrics = training.advance(batch_of(row), *keys_of(row, step))
            # Adafactor's placeholders of one element are constants of its update.
            found.gone += [x.is_deleted() for x in old if x.size > 1 or not row.donate]
            names = ("loss", "grad_norm", "scale", *["skipped"] * row.skip)
            found.metrics.append({name: float(metrics[name]) for name in names})
    return found


def untrained(row: Row) -> tuple[Any, ...]:
    """A row's step, and what it is called with first, on a state that has not been trained."""
    training = Training(row, state_at(row, start(row)))
    return training.call(batch_of(row), *keys_of(row, 0))


def compiled(row: Row) -> str:
    step, *args = untrained(row)
    return step.lower(*args).compile().as_text()


def keys_of(row: Row, step: int) -> tuple[jax.Array, ...]:
    return (key_of(step),) if row.noisy else ()


def check(row: Row) -> None:
    """Compares everything that a row's steps made with one device."""
    found, ends = run(row), trajectory(row)
    state = found.training.get()
    check_numbers(row, found, ends)
    check_places(row, found, state)
    if row.skip:
        check_skips(row, found.training)
    assert found.training.compiled._cache_size() == 1, "compiled more than once"


def check_by_verify(row: Row) -> None:
    with mock.patch("zerojax._features.activations.LEAST_MOVED", 0):
        step, *args = run(row).training.call(batch_of(row), *keys_of(row, 0))
        zerojax.verify(step, *args, whole_batch=row.model != "convnet").check()


# -- numbers

# The most error of an optimizer's state, of parameters and of metrics where something is rounded.
# Adam, and what normalizes like it, makes steps of full size of the rounding of small gradients.
ROUNDED, COARSE = (0.05, 0.35, 0.02), (0.3, 0.6, 0.1)
FLOAT8 = (0.2, 0.35, 0.04)  # weights are off by 3%, gradients by more, their squares by twice that
EXACT = (5e-5, 1e-4, 1e-5)
CODES = {"int8", "int4", "float8_e4m3fn"}


def check_numbers(row: Row, found: Run, ends: list[End]) -> None:
    state = found.training.get()
    sent = set(re.findall(r"(?:weight|gradient) (\w+)", str(state.tx.plan))) & CODES
    read = settings(ELSEWHERE.get(row.source, {}).get("precision", ""))
    stored = {*settings(row.precision).items(), *read.items()}
    rounds = sent | stored | (set(settings(row.codes).values()) - CODES)
    limits = FLOAT8 if "float8_e4m3fn" in sent or ("moments", "int8") in stored else ROUNDED
    limits = COARSE if "int4" in sent else limits
    of_state, of_params, of_metrics = limits if rounds else EXACT
    if row.sequence and rounds:  # devices add up gradients of keys and values, rounded once more
        of_metrics *= 1.5
    if row.optimizer == "muon" and rounds:  # it makes a whole step of what rounding is off by
        of_params = math.inf if "int4" in sent else COARSE[1]
    for at, metrics in enumerate(found.metrics, found.first + 1):
        wanted = ends[at].metrics | ({"skipped": 0.0} if row.skip else {})
        assert metrics == pytest.approx(wanted, rel=of_metrics), f"metrics of step {at}"
    before, wanted = ends[found.first], ends[-1]
    shown = shown_as_on_one_device(row, state, wanted)
    norms = row.optimizer == "novograd" and bool(rounds)
    off = errors(shown.opt_state, wanted.opt_state, before.opt_state, norms)
    assert_less(off, of_state, "opt_state")
    off_params = errors(shown.params, wanted.params, before.params)
    assert_less(off_params, of_params, "params")
    assert (shown.stats is not None) == (row.fields or row.model == "nnx")
    if shown.stats is not None:
        assert_less(errors(shown.stats, wanted.stats, before.stats), of_metrics, "stats")
    worst = max(*off.values(), *off_params.values())  # Adafactor's state has only means of squares
    assert not sent or worst > 1e-4, f"{sent} did not travel as codes"
    assert int(state.step) == len(found.metrics)


def shown_as_on_one_device(row: Row, state: Any, wanted: End) -> End:
    """Of parameters that are stored in 16 bits, the masters. Frozen ones have none: they are those
    of one device, rounded."""
    state = jax.device_get(zerojax.unpad(state))
    params, opt_state = zerojax.manual.dequantize(state.params), state.opt_state
    wrapped, masters = settings(row.precision), None
    if "master" in wrapped:
        masters, opt_state = masters_of(state.params, opt_state)
    if "moments" in wrapped:
        opt_state = moments_of(opt_state)
    if masters is not None:
        stored, masters = named(params), named(masters)
        params = named(wanted.params) | masters
        assert stored.keys() == params.keys()
        assert row.optimizer == "frozen" or masters.keys() == params.keys()
        for name, exact in params.items():
            # XLA may compute a master twice, in two fusions that do not round its last bit alike.
            off = 1e-6 * np.abs(exact) + 1e-9
            ends = [(exact + sign * off).astype(stored[name].dtype) for sign in (-1, 1)]
            nearest = np.clip(stored[name], np.minimum(*ends), np.maximum(*ends))
            np.testing.assert_array_equal(stored[name], nearest, name)
    stats = state.variables["values"] if row.model == "nnx" else getattr(state, "stats", None)
    return End(params, opt_state, stats, {})


def masters_of(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """The masters, of parameters that have any, and the state that `master_weights` wraps."""
    if not hasattr(opt_state, "correction"):
        return opt_state.master, opt_state.inner
    joined = lambda code, weight: code if is_hole(code) else encodings.joined(weight, code)
    masters = jax.tree.map(joined, opt_state.correction, params, is_leaf=is_hole)
    return masters, opt_state.inner


def moments_of(opt_state: Any) -> Any:
    """The state that `narrow_moments` wraps."""
    if not hasattr(opt_state, "scales"):
        return opt_state.inner
    decoded = lambda scale, codes: codes if is_hole(scale) else encodings.decoded(codes, scale)
    return jax.tree.map(decoded, opt_state.scales, opt_state.inner, is_leaf=is_hole)


def is_hole(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}


def errors(found: Any, wanted: Any, before: Any, norms: bool = False) -> dict[str, float]:
    """The error of each leaf, in parts of how far it went; of leaves that hardly move, in parts of
    what others do. What one device leaves as it is may not change in a bit. Of `norms`, which are
    numbers in a state and hardly move, in parts of what they are."""
    found, wanted, before = map(named, (found, wanted, before))
    assert found.keys() == wanted.keys() == before.keys()
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
    moved = {name: norm(wanted[name] - before[name]) for name in wanted}
    numbers = {k for k, x in wanted.items() if norms and x.ndim == 0 and x.dtype.kind == "f"}
    floor = 0.05 * max((moved[name] for name in moved.keys() - numbers), default=0)
    moved |= {name: norm(wanted[name]) for name in numbers}
    off = {}
    for name, value in found.items():
        stays = not moved[name] or value.dtype.kind in "biu"
        off[name] = norm(value - wanted[name]) / max(moved[name], floor, 1e-30)
        off[name] = math.inf if stays and off[name] else off[name]
    return off


def assert_less(off: dict[str, float], limit: float, what: str) -> None:
    wrong = {name: f"{error:.1e}" for name, error in off.items() if not error <= limit}
    assert not wrong, f"{what} are off by more than {limit:.0e} of how far they went: {wrong}"


# -- places


def check_places(row: Row, found: Run, state: Any) -> None:
    plan = state.tx.plan
    assert set(found.gone) == {row.donate}, "the old state is gone, or is not"
    for leaf, value in zip(plan.leaves, jax.tree.leaves(state), strict=True):
        place = leaf.rest.sharding(plan._given_mesh or plan.mesh)
        is_alike = row.explicit and value.sharding.is_equivalent_to(place, value.ndim)
        assert is_alike or value.sharding == place, leaf.path  # types of arrays have whole specs
        outside = np.array(value)
        outside[tuple(map(slice, leaf.shape))] = 0
        assert not outside.any(), f"the padding of {leaf.path}"
        if leaf.kind in ("params", "opt_state") and leaf.shape:
            assert (value.sharding.memory_kind == "pinned_host") == (leaf.kind in row.offload)
    check_shards(row, state)


def check_shards(row: Row, state: Any) -> None:
    """Large parameters, and what has their shapes, are in as many parts as the stage says."""
    where = placing(row)
    groups = where.get("groups") or dict.fromkeys(KINDS[: row.stage], tuple(row.sizes))
    experts = {row.apart} - {None}

    def parts(kind: str, apart: set[str]) -> int:
        others = {*groups.get("opt_state", ())} if {*groups.get(kind, ())} - apart else set()
        return math.prod(row.sizes[axis] for axis in others | apart)

    plan = state.tx.plan
    large = {
        p.path.removeprefix("params/"): p.shape for p in plan.params if math.prod(p.shape) >= 128
    }
    kinds = set()
    for leaf, value in zip(plan.leaves, jax.tree.leaves(state), strict=True):
        follows = any(leaf.path.endswith(f"/{p}") and leaf.shape == large[p] for p in large)
        if (
            follows
            and leaf.kind in ("params", "opt_state")
            and not leaf.frozen
            and row.shapes != "whole"
        ):
            pieces = value.size / value.addressable_shards[0].data.size
            wanted = parts(leaf.kind, experts if "experts" in leaf.path else set())
            assert pieces == wanted, f"{leaf.path} is in {pieces} parts"
            kinds.add(leaf.kind)
    assert "params" in kinds or row.shapes == "whole"


def check_skips(row: Row, training: Training) -> None:
    """A step that is not finite on one device changes nothing but the count of steps."""
    batch = batch_of(row)
    batch["gain"][0] = np.nan
    before = jax.device_get(training.get())
    assert training.advance(batch, *keys_of(row, 0))["skipped"] == 1
    after = jax.device_get(training.get())
    assert after.step == before.step + 1
    jax.tree.map(np.testing.assert_array_equal, after, before.replace(step=after.step))
