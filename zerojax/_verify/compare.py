"""Holds what a step made against a reference: leaf by leaf, element by element, copy by copy."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._state.state import OPT_STATE, PARAMS, Leaf, path_name

OK, WRONG, UNSEEN = "ok", "wrong", "too small to tell"
NOT_FINITE = "not finite on one device either"

# How far apart two orders of summation may land, measured against the largest element of a leaf.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
# What matrix units of accelerators make of float32 unless told otherwise.
MATMUL_DTYPES = {"gpu": "float16", "cuda": "float16", "rocm": "float16", "tpu": "bfloat16"}
# Gradients smaller than this share of the whole gradient's largest element are rounding noise of
# the others (the bias of attention's keys, a bias before BatchNorm) and are measured against it.
NOISE_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Check:
    """One leaf against its reference, at the element that is worst off.

    `scale` is the largest element of what is judged: of the reference or, for a leaf of the state,
    of the change that the step should make. `copies_differ` says that devices which should hold
    the same do not.
    """

    path: str
    kind: str
    difference: float
    scale: float
    tolerance: float
    verdict: str
    copies_differ: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.verdict.startswith(WRONG)

    @property
    def excess(self) -> float:
        """How many times the tolerance; beyond 1 it is wrong."""
        if self.tolerance == 0:
            return np.inf if self.difference else 0.0
        return self.difference / self.tolerance


def tolerance_for(dtypes: Sequence[Any], platform: str) -> float:
    """The tolerance of a computation that goes through all of these dtypes."""
    names = [str(jnp.dtype(dtype)) for dtype in dtypes]
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if "float32" in names and platform in MATMUL_DTYPES and not exact:
        names.append(MATMUL_DTYPES[platform])
    return max(TOLERANCES.get(name, 0.25) for name in names)


def compare(
    path: str, kind: str, value: Any, reference: Any, allowed: Any, judged: Any = None
) -> Check:
    """Compares every device's copy of a leaf with the reference.

    Arguments:
        allowed: how far off, in all or for each element.
        judged: what must come out visibly larger than `allowed`; default, the reference.
    """
    wanted = numbers(reference)
    judged = np.abs(wanted if judged is None else judged)
    scale = float(np.max(judged, initial=0.0))
    if jnp.shape(value) != jnp.shape(reference):
        verdict = f"{WRONG}: shape {jnp.shape(value)}, not {jnp.shape(reference)}"
        return Check(path, kind, np.inf, scale, 0.0, verdict)
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), wanted.shape)
    worst, off, limit, seen, differ = -1.0, 0.0, 0.0, {}, False
    for index, raw in copies(value):
        first = seen.setdefault(str(index), raw)
        if first is not raw:
            if first.tobytes() == raw.tobytes():
                continue
            differ = True
        if not raw.size:
            continue
        offs = difference(raw.astype(wanted.dtype), wanted[index])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.nan_to_num(offs / allowed[index], nan=0.0, posinf=np.inf)
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        if ratio[at] > worst:
            worst, off, limit = float(ratio[at]), float(offs[at]), float(allowed[index][at])
    tells = np.any(allowed < judged) or not scale
    verdict = OK if tells else UNSEEN
    if _tells_nothing(kind, wanted):
        verdict = NOT_FINITE
    verdict = WRONG if off > limit else verdict
    return Check(path, kind, off, scale, limit, verdict, differ)


def _tells_nothing(kind: str, wanted: np.ndarray) -> bool:
    """Gradients and what they led to. Infinities in a state may be meant: a best value so far."""
    if kind in (PARAMS, OPT_STATE):
        return bool(np.isnan(wanted).any())
    return kind == "gradient" and not np.isfinite(wanted).all()


def gradient_limits(grads: Any, tolerance: float) -> Any:
    """For each leaf of the gradients: how far off rounding may put it."""

    def size(grad: Any) -> float:
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return 0.0
        return float(np.max(np.abs(np.nan_to_num(numbers(grad))), initial=0.0))

    largest = jax.tree.map(size, grads)
    floor = NOISE_SHARE * max(jax.tree.leaves(largest), default=0.0)
    return jax.tree.map(lambda size: tolerance * max(size, floor), largest)


def spread(update: Callable[[Any], Any], reference: Any, grads: Any, limits: Any) -> list[Any]:
    """How far the new state moves when gradients move within their limits, for each element.

    Optimizers differ in what they make of noise: Adam turns that of a gradient which is zero in
    truth into steps of full size. So the user's own optimizer is asked, with noise of one sign,
    of the other, and of random signs; the median stands for what these few tries miss where all
    elements hang together (norms, Muon). Exact zeros, such as rows of an embedding that nothing
    used, stay zeros.
    """
    random = np.random.default_rng(0)

    def noisy(grad: Any, limit: float, sign: int) -> Any:
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return grad
        signs = sign or random.choice([-1.0, 1.0], grad.shape)
        return jnp.where(grad == 0, grad, grad + jnp.asarray(signs * limit, grad.dtype))

    wanted = [numbers(leaf) for leaf in jax.tree.leaves(reference)]
    most = [np.zeros(leaf.shape, np.float32) for leaf in wanted]
    for sign in (1, -1, 0, 0):
        signs = jax.tree.map(lambda _: sign, limits)  # noqa: B023
        moved = update(jax.tree.map(noisy, grads, limits, signs))
        for far, leaf, new in zip(most, wanted, jax.tree.leaves(moved), strict=True):
            np.maximum(far, difference(numbers(new), leaf), out=far, casting="unsafe")
    return [2 * far + 10 * np.median(far) if far.size else far for far in most]


def compare_states(
    new: Sequence[Leaf], old: Sequence[Any], wanted: Sequence[Leaf], spreads: Any, tolerance: float
) -> Iterator[Check]:
    """Leaf by leaf of a state: judged against the change that the step should make."""
    found = {leaf.name: leaf.value for leaf in new}
    for leaf, before, far in zip(wanted, old, spreads, strict=True):
        if leaf.name not in found:
            yield Check(leaf.name, leaf.kind, np.inf, 0.0, 0.0, f"{WRONG}: missing")
            continue
        reference, before = numbers(leaf.value), numbers(before)
        change = reference - before
        allowed = far
        if jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            size = np.max(np.abs(np.nan_to_num(change)), initial=0.0)
            eps = float(jnp.finfo(leaf.value.dtype).eps)
            allowed = far + tolerance * size + 4 * eps * np.abs(np.nan_to_num(reference))
        yield compare(leaf.name, leaf.kind, found[leaf.name], leaf.value, allowed, change)


def compare_trees(
    kind: str, tree: Any, wanted: Any, allowed: Callable[[Any], Any]
) -> Iterator[Check]:
    """Leaf by leaf of two trees of the same structure; `allowed` is asked for each reference."""
    leaves = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, reference), value in zip(leaves, jax.tree.leaves(tree), strict=True):
        name = "/".join(filter(None, (kind, path_name(path))))
        yield compare(name, kind, value, reference, allowed(reference))


def copies(value: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Where each piece of an array belongs and what it holds, for every device that has one."""
    if isinstance(value, jax.Array):
        for shard in value.addressable_shards:
            yield shard.index, _raw(shard.data)
    else:
        yield ..., np.asarray(value)


def numbers(value: Any) -> np.ndarray:
    """On the host and wide; a key as its words."""
    raw = _raw(value)
    return raw.astype(np.complex128 if np.iscomplexobj(raw) else np.float64)


def _raw(value: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def difference(value: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Element by element; what is not finite must be equal."""
    with np.errstate(invalid="ignore"):
        off = np.abs(value - reference)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
