"""Compares a step's results with a reference: leaf by leaf, element by element, copy by copy."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from zerojax._state.state import OPT_STATE, PARAMS, leaves_with_paths
from zerojax._table import Printed, Table
from zerojax._types import PyTree, Shape, is_key

Piece = tuple[slice, ...]
ByName: TypeAlias = Mapping[str, jax.Array]  # of a state, by name
Spreads: TypeAlias = Mapping[str, np.ndarray]  # how far rounding moves each element of them

PADDING = "padding"  # the kind of a check
RIGHT, WRONG, UNSEEN = "ok", "wrong", "too small to tell"
NOT_FINITE = "not finite in the replay either"

# How far apart two orders of summation may end, relative to the largest element of a leaf.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
# The precision to which matrix units of accelerators round float32 by default.
MATMUL_DTYPES = {"gpu": "float16", "cuda": "float16", "rocm": "float16", "tpu": "bfloat16"}
# A gradient below this share of the largest element of all gradients is rounding noise (the bias of
# attention's keys, a bias before BatchNorm). Its error is judged relative to that element.
NOISE_SHARE = 0.05
ROWS_SHOWN = 12
CHECKED = ("leaf", "kind", "max difference", "scale", "tolerance", "verdict")


@dataclasses.dataclass(frozen=True)
class Check:
    """One leaf and its reference, at the element that differs most for its tolerance.

    `scale` is the largest element of the reference or, for a leaf of the state, of the change that
    the step should make. `copies_differ` says that devices hold different values that should be the
    same.
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
        """The difference in tolerances; above 1 it is wrong."""
        if self.tolerance == 0:
            return np.inf if self.difference else 0.0
        return self.difference / self.tolerance

    def cells(self) -> tuple[str | float, ...]:
        verdict = self.verdict + (", copies differ" if self.copies_differ else "")
        return self.path, self.kind, self.difference, self.scale, self.tolerance, verdict


@dataclasses.dataclass(repr=False)
class Verification(Printed):
    """The result of `zerojax.verify`; print it to see.

    `losses` are the step's, the mean over the parts of the batch on one device, and that of the
    whole batch at once; `checks` has one for each leaf, worst first; `causes` names the likely
    mistakes and their remedies; `notes` says what could not be compared.
    """

    losses: dict[str, float]
    tolerance: float
    checks: list[Check] = dataclasses.field(default_factory=list)
    causes: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and nothing is wrong."""
        return not self.wrong and not self.not_finite

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.is_wrong]

    @property
    def not_finite(self) -> list[Check]:
        """The checks that compared nothing, because both sides are NaN or infinite."""
        return [check for check in self.checks if check.verdict == NOT_FINITE]

    def check(self) -> "Verification":
        """Raises an `AssertionError` that says what `print` says, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))
        return self

    def to_dict(self) -> dict[str, object]:
        """Returns the same in plain Python types, as `json` takes them."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def table(self) -> Table:
        unseen = sum(check.verdict == UNSEEN for check in self.checks)
        title = f"wrong: {len(self.wrong)} of {len(self.checks)} comparisons"
        if not self.wrong and self.not_finite:
            title = f"cannot tell: {len(self.not_finite)} of {len(self.checks)} are not finite"
        if self.ok:
            title = f"the step agrees with one device in {len(self.checks)} comparisons"
        title += f" ({unseen} too small to tell)" if unseen else ""
        width = max(map(len, self.losses))
        losses = [f"  {name.ljust(width)}  {value:.7g}" for name, value in self.losses.items()]
        remarks = [f"* {text}" for text in (*self.causes, *self.notes)]
        left = len(self.checks) - ROWS_SHOWN
        return Table(
            CHECKED,
            [check.cells() for check in self.checks[:ROWS_SHOWN]],
            title=[f"{title}; tolerance {self.tolerance:.0e}", *losses, *remarks],
            notes=[f"and {left} more, none worse"] if left > 0 else [],
            formats=dict.fromkeys(CHECKED[2:5], "{:.2e}".format),
        )


def tolerance_for(dtypes: Sequence[DTypeLike], platform: str) -> float:
    """Returns the tolerance of a computation that goes through all of these dtypes."""
    names = [str(jnp.dtype(dtype)) for dtype in dtypes]
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if "float32" in names and platform in MATMUL_DTYPES and not exact:
        names.append(MATMUL_DTYPES[platform])
    return max(TOLERANCES.get(name, 0.25) for name in names)


def compare(
    path: str,
    kind: str,
    value: ArrayLike,
    reference: ArrayLike,
    allowed: ArrayLike,
    *,
    judged: np.ndarray | None = None,
    rests: Shape | None = None,
) -> Check:
    """Compares every device's copy of a leaf with the reference.

    Arguments:
        allowed: the largest difference allowed, for the leaf or for each element.
        judged: the values that must be visibly larger than `allowed`; default, the reference.
        rests: the shape that the leaf may have with padding, which is not compared.
    """
    wanted = numbers(reference)
    judged = np.abs(wanted if judged is None else judged)
    scale = float(np.max(judged, initial=0.0))
    if jnp.shape(value) not in (jnp.shape(reference), rests):
        verdict = f"{WRONG}: shape {jnp.shape(value)}, not {jnp.shape(reference)}"
        return Check(path, kind, np.inf, scale, 0.0, verdict)
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), wanted.shape)
    worst, off, limit, differ = -1.0, 0.0, 0.0, False
    seen: dict[str, np.ndarray] = {}
    for index, padded in copies(value):
        raw = padded[without_padding(index, jnp.shape(reference))]
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
    verdict = RIGHT if np.any(allowed < judged) or not scale else UNSEEN
    # A state may have infinities on purpose: a best value.
    is_nan = kind in (PARAMS, OPT_STATE) and np.isnan(wanted).any()
    if is_nan or (kind == "gradient" and not np.isfinite(wanted).all()):
        verdict = NOT_FINITE
    verdict = WRONG if off > limit else verdict
    return Check(path, kind, off, scale, limit, verdict, differ)


def gradient_limits(grads: PyTree, tolerance: float) -> PyTree:
    """Returns, for each leaf of the gradients, the largest difference that rounding explains."""

    def size(grad: jax.Array) -> float:
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return 0.0
        return float(np.max(np.abs(np.nan_to_num(numbers(grad))), initial=0.0))

    largest = jax.tree.map(size, grads)
    floor = NOISE_SHARE * max(jax.tree.leaves(largest), default=0.0)
    return jax.tree.map(lambda size: tolerance * max(size, floor), largest)


def led_to(
    update: Callable[[PyTree], ByName], grads: PyTree, tolerance: float, observed: PyTree
) -> tuple[ByName, Spreads]:
    """Returns the new state that gradients lead to, and how far each of its elements moves while
    they stay in their limits.

    Optimizers treat noise differently: Adam turns the noise of a gradient whose true value is zero
    into steps of full size. Therefore the user's own optimizer runs on noise of one sign, of the
    other, and of random signs. Where all elements depend on each other (norms, Muon) these few
    tries miss some, for which the median stands. An element that is exactly zero in the observed
    gradients too, such as a row of an embedding that nothing used, stays zero. The observed
    gradients may have padding.
    """
    random = np.random.default_rng(0)

    def noisy(sign: int, grad: jax.Array, limit: float, seen: ArrayLike) -> jax.Array:
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return grad
        signs = sign or random.choice([-1.0, 1.0], grad.shape)
        is_zero = (grad == 0) & (numbers(seen)[tuple(map(slice, grad.shape))] == 0)
        return jnp.where(is_zero, grad, grad + jnp.asarray(signs * limit, grad.dtype))

    state, limits = update(grads), gradient_limits(grads, tolerance)
    wanted = {name: numbers(leaf) for name, leaf in state.items()}
    most = {name: np.zeros(leaf.shape, np.float32) for name, leaf in wanted.items()}
    for sign in (1, -1, 0, 0):
        moved = update(jax.tree.map(functools.partial(noisy, sign), grads, limits, observed))
        for name, far in most.items():
            off = difference(numbers(moved[name]), wanted[name])
            np.maximum(far, off, out=far, casting="unsafe")
    return state, {k: 2 * far + 10 * np.median(far) if far.size else far for k, far in most.items()}


def compare_padding(path: str, value: ArrayLike, shape: Shape) -> Check:
    """Checks that all elements of a leaf beyond its logical shape are zero, on every device."""
    off = 0.0
    for index, raw in copies(value):
        offs = difference(raw, np.zeros_like(raw))
        offs[without_padding(index, shape)] = 0
        off = max(off, float(np.max(offs, initial=0.0)))
    return Check(path, PADDING, off, 0.0, 0.0, WRONG if off else RIGHT)


def compare_trees(
    prefix: str, kind: str, tree: PyTree, wanted: PyTree, limits: PyTree, rests: PyTree = None
) -> Iterator[Check]:
    """Compares two trees of the same structure leaf by leaf; `limits` has one for each.

    `rests` has the shapes to which leaves of the first tree may be padded.
    """
    leaves = leaves_with_paths(wanted)
    others = [*map(jax.tree.leaves, (tree, limits)), rests or [None] * len(leaves)]
    for leaf, value, limit, shape in zip(leaves, *others, strict=True):
        if kind == "gradient" and not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            continue  # an integer's or a key's
        name = "/".join(filter(None, (prefix, leaf.name)))
        yield compare(name, kind, value, leaf.value, limit, rests=shape)


def copies(value: ArrayLike) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields the index of each piece of an array and its value, for every device that has it."""
    if isinstance(value, jax.Array):
        for shard in value.addressable_shards:
            yield shard.index, _raw(shard.data)
    else:
        yield (slice(None),) * np.ndim(value), np.asarray(value)


def without_padding(index: Piece, shape: Shape) -> Piece:
    """Returns where a piece of an array at `index` is no padding; `shape` is without it."""
    pairs = zip(index, shape, strict=False)  # the words of a key have a dimension more
    return tuple(slice(max(0, size - (piece.start or 0))) for piece, size in pairs)


def numbers(value: ArrayLike) -> np.ndarray:
    """Returns a value on the host in a wide dtype; for a key, its words."""
    raw = _raw(value)
    return raw.astype(np.complex128 if np.iscomplexobj(raw) else np.float64)


def _raw(value: PyTree) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def largest(values: ArrayLike | Sequence[float]) -> float:
    """Returns the largest size of the finite values."""
    sizes = np.abs(np.asarray(values, np.float64))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def difference(value: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns the distance of each element; elements that are not finite must be equal."""
    with np.errstate(invalid="ignore"):
        off = np.abs(value - reference)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
