"""What a row of `space.py` should give: three steps on one device, in plain JAX and optax.

The gradients are sums over parts of the batch, one for each device and microbatch. A part has
always as many rows, so that one program serves all rows of the space that share a model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.support.space import Row
from tests.support.subjects import Subject, subject

STEPS, PART, RATE = 3, 2, 0.2  # rows of a part; of dropout
EPS = 1e-4  # Adam's own 1e-8 turns rounding noise of tiny gradients into steps of full size


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def some_frozen(params: Any) -> Any:
    """Freezes leaves of all kinds: weights of a loop, vectors, tables."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        "frozen" if at % 4 in (1, 2) else "trained" for at in range(len(leaves))
    )


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-2, eps=EPS)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=EPS),
    # Of the odd shapes, padding takes one over this, so that it would be factored.
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=38),
    "muon": lambda: optax.contrib.muon(1e-2, eps=EPS),
    "several": lambda: optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
        optax.multi_transform({"matrix": adam(), "vector": optax.sgd(0.1, momentum=0.9)}, by_rank),
    ),
    "wrapped": lambda: optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(0.1), optax.contrib.schedule_free_adamw(1e-2, eps=EPS)
        ),
        every_k_schedule=2,
    ).gradient_transformation(),
    "frozen": lambda: optax.multi_transform(
        {"trained": adam(), "frozen": optax.set_to_zero()}, some_frozen
    ),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), adam()),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2, eps=EPS),
    "momentum": lambda: optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "novograd": lambda: optax.novograd(1e-2, eps=EPS),
    "scheduled": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 1e-3, 10), eps=EPS
    ),
}


@dataclasses.dataclass(frozen=True)
class End:
    """What there is after a step."""

    params: Any
    opt_state: Any
    stats: Any
    metrics: dict[str, float]


def subject_of(row: Row) -> Subject:
    return subject(row.model, row.shapes != "even")


def batch_of(row: Row) -> dict[str, Any]:
    """Ragged: some rows are masked, of some parts all. Rows differ in `gain`, their weight."""
    rows = row.parts * PART
    at = np.arange(rows)
    mask = (at % 5 < 3) & (at // PART % 3 > 0) | (at == 0)
    x = subject_of(row).inputs(np.random.default_rng(6), rows)
    gain = 1 + 0.5 * np.cos(at, dtype=np.float32)
    return {"x": x, "gain": gain, "mask": mask | (not row.masked)}


@functools.cache
def _part(model: str, is_odd: bool) -> Callable[..., Any]:
    """The gradient of a sum of losses over one part, with what else the loss makes of it."""
    made = subject(model, is_odd)

    def total(params, stats, part, key, rate):
        model = made.model_of(params)
        losses, new, scale = made.apply(model, stats, part["x"], key, rate, lambda f: f)
        losses = losses * part["gain"]
        return jnp.sum(jnp.where(part["mask"], losses, 0)), (new, scale)

    @jax.jit
    def run(params, stats, part, keys, device, microbatch, rate):
        key = jax.random.fold_in(keys, device)
        key = jnp.where(microbatch < 0, key, jax.random.fold_in(key, microbatch))
        return jax.value_and_grad(total, has_aux=True)(params, stats, part, key, rate)

    return run


def _sums(row: Row, params: Any, stats: Any, step: int) -> tuple[Any, Any, dict[str, Any]]:
    """The gradients of the whole batch, the new statistics, and the metrics."""
    batch, rate = batch_of(row), RATE if row.noisy else 0.0
    run = _part(row.model, row.shapes != "even")
    found = []
    for at in range(row.parts):
        device, microbatch = divmod(at, row.accumulate)
        part = jax.tree.map(lambda x: x[at * PART : (at + 1) * PART], batch)
        microbatch = microbatch if row.accumulate > 1 else -1
        found.append(run(params, stats, part, key_of(step), device, microbatch, rate))
    ((losses, (new, scales)), grads) = jax.tree.map(
        lambda *xs: np.stack(xs), *jax.device_get(found)
    )
    count = np.float32(batch["mask"].sum())  # an integer would make float64 of what it divides
    total = lambda x: x.sum(0, dtype=np.float64).astype(np.float32)
    mean = lambda x: total(x / len(x)) if x.dtype != np.int32 else x[0]
    metrics = {"loss": total(losses) / count, "scale": mean(scales)}
    return jax.tree.map(lambda g: total(g) / count, grads), jax.tree.map(mean, new), metrics


def key_of(step: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(5), step)


@functools.cache
def _update(model: str, is_odd: bool, optimizer: str) -> Callable[..., Any]:
    tx = OPTIMIZERS[optimizer]()

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


def norm_of(row: Row, grads: Any) -> np.floating:
    """Of the gradients that the step has: none of what is frozen."""
    labels = jax.tree.leaves(some_frozen(grads))
    pairs = zip(jax.tree.leaves(grads), labels, strict=True)
    trains = [g for g, label in pairs if row.optimizer != "frozen" or label == "trained"]
    return np.linalg.norm([np.linalg.norm(np.asarray(g, np.float64)) for g in trains])


@functools.lru_cache(1)
def start(row: Row) -> End:
    made = subject_of(row)
    opt_state = jax.device_get(jax.jit(OPTIMIZERS[row.optimizer]().init)(made.params))
    params = as_packed(made.params, row.packed) if row.packed else made.params
    return End(params, opt_state, made.stats, {})


def as_packed(params: Any, codes: str) -> Any:
    """Parameters with the error of codes in the frozen matrices."""
    packed = zerojax.manual.dequantize(zerojax.quantize(params, codes))
    labels = some_frozen(params)
    return jax.device_get(
        jax.tree.map(lambda of, a, b: a if of == "frozen" else b, labels, packed, params)
    )


@functools.lru_cache(1)  # a row's training and its check ask for it
def trajectory(row: Row) -> list[End]:
    """The state before training, and after each step."""
    ends = [start(row)]
    params, opt_state, stats = ends[0].params, ends[0].opt_state, ends[0].stats
    update = _update(row.model, row.shapes != "even", row.optimizer)
    for step in range(STEPS):
        grads, new, metrics = _sums(row, params, stats, step)
        metrics["grad_norm"] = norm_of(row, grads)
        params, opt_state = jax.device_get(update(grads, opt_state, params))
        stats = new if row.fields else stats
        metrics = {name: float(value) for name, value in metrics.items()}
        ends.append(End(params, opt_state, stats, metrics))
    return ends
