"""Runs a jaxpr of whole sequences on one device's blocks of them.

Each value that depends on tokens is in `Blocks`; all else is whole, the same on all devices of the
axis. What treats tokens alike runs on blocks. What mixes them has a rule in `_passes/mixing.py`.
What has no rule gathers its operands, which is exact, and is reported, or refused above a limit.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.random import threefry2x32_p
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import ELEMENTWISE, Atom, Eqn, is_var, primitives, type_of, with_sizes
from zerojax._parallel import IN_PLACE, parallel
from zerojax._passes.blocks import Axis, Blocks
from zerojax._table import human_bytes
from zerojax._types import PyTree, Shape

# What a value may wait for: no one needs it before something says which block.
WAITING = ELEMENTWISE - primitives("optimization_barrier sharding_constraint device_put") | (
    primitives("iota broadcast_in_dim transpose squeeze reshape concatenate gather random_bits")
)


# What a loss sends for its tokens. OTHERS are operands that something needs whole.
KEYS, HEADS, HALO = "keys and values", "tokens in exchange for heads", "tokens of neighbours"
TOTALS, SINGLE, CARRIES = "sums over tokens", "single tokens", "carries of scans over tokens"
OTHERS = "others"


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A value of a loss of whole sequences, of this shape: an array, whole or in blocks.

    Or it waits: `eqn` computes it from the operands, of each block alone. So masks, positions and
    what is broadcast are never whole.
    """

    shape: Shape
    array: PyTree = None
    at: Blocks | None = None
    eqn: JaxprEqn | None = None
    operands: tuple["Tracked", ...] = ()

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of the arrays that it is computed from, as if they were whole."""
        if self.eqn is not None:
            return sum(operand.nbytes for operand in self.operands)
        return int(np.prod(self.shape)) * jnp.result_type(self.array).itemsize


@dataclasses.dataclass(frozen=True)
class Received:
    """What each device receives for the tokens of a loss, in a forward pass."""

    what: str
    nbytes: int
    place: str  # the operation, and the line of the model that has it
    is_limited: bool = False


Ruled: TypeAlias = "list[Tracked] | None"
TokenRule: TypeAlias = Callable[..., Ruled]
Readings: TypeAlias = dict[Var, list[tuple[JaxprEqn, int]]]
Layouts: TypeAlias = Sequence[Blocks | None]


class Region:
    """What a loop's body, a `jax.checkpoint` or all the rest computes of tokens, and sends."""

    def __init__(self) -> None:
        self.nbytes, self.sent = 0, list[Received]()


class BlockRunner:
    """Runs a jaxpr of whole sequences on one device's blocks."""

    def __init__(
        self,
        axis: Axis,
        control: Mapping[str, Callable[..., list[Tracked]]],
        rules: Callable[[str, bool], TokenRule | None],
        most_gathered: float,
        scope: str = "sequences",
    ) -> None:
        self.axis, self.most_gathered = axis, most_gathered
        self.name_scope = scope  # of what it sends, for audits
        self.control, self.rules = control, rules
        self.regions = [Region()]
        # What waits, once computed, and what was moved, in this scope of JAX's and those around it.
        self.known: list[dict[tuple[int, Blocks | None], tuple[Tracked, Array]]] = [{}]
        self.callers: list[tuple[Jaxpr, JaxprEqn | None]] = []
        self.instead: JaxprEqn | None = None  # of the loss, in place of which others run
        self.all_readers: dict[Jaxpr, Readings] = {}
        self.naturals: dict[Tracked, Blocks | None] = {}

    # -- from one layout to another

    def array(self, value: Tracked, at: Blocks | None, eqn: JaxprEqn, what: str = OTHERS) -> Array:
        """Returns a value in these blocks, or whole. `eqn` needs it, and `what` it is for it."""
        if value.eqn is None and (value.at == at or not value.shape):
            return value.array
        for known in self.known:
            if (id(value), at) in known:
                return known[id(value), at][1]
        if value.eqn is not None:
            array = self.computed(value, value.eqn, at, eqn, what)
        else:
            array = self.moved(value, at, eqn, what)
        self.known[-1][id(value), at] = value, array
        return array

    def moved(self, value: Tracked, at: Blocks | None, eqn: JaxprEqn, what: str) -> Array:
        """Returns a value in other blocks than it is."""
        array = jnp.asarray(value.array)
        if value.at is None:
            return array if at is None else self.axis.cut(array, at)
        if at is None or not (at.is_plain and value.at.is_plain):
            with self.sending(what, eqn, value.nbytes):
                array = self.axis.gathered(array, value.at, value.shape)
            return self.axis.cut(array, at) if at else array
        with self.sending(HEADS, eqn, value.nbytes // self.axis.size):
            return self.axis.exchanged(array, value.at, at, value.shape)

    def computed(
        self, value: Tracked, eqn: JaxprEqn, at: Blocks | None, reader: JaxprEqn, what: str
    ) -> Array:
        """Returns a block of a value that waits."""
        name, shape = eqn.primitive.name, self.axis.local(value.shape, at)
        if name == "iota":
            dtype = type_of(eqn.outvars[0]).dtype
            return self.counted(value.shape, dtype, Eqn(eqn).dimension, at)
        if name == "random_bits":
            return self.random_bits(value, eqn, at, shape)
        maps = self.before(eqn, at)
        if maps is None:
            assert at is not None
            return self.axis.cut(self.array(value, None, reader, what), at)
        pairs = zip(value.operands, maps, strict=True)
        arrays = [self.array(operand, place, reader, what) for operand, place in pairs]
        return _compat.bind(local(eqn, shape, arrays), arrays)[0]

    def before(self, eqn: JaxprEqn, at: Blocks | None) -> Layouts | None:
        """Returns the blocks of operands for a result in these; None where no operand has them."""
        shapes = [type_of(v).shape for v in eqn.invars]
        if at is None:
            return [None] * len(shapes)
        if eqn.primitive.name == "reshape":
            place = at.reshaped(type_of(eqn.outvars[0]).shape, shapes[0], self.axis.size)
            return [place] if place else None
        places = [at.back(dims) for dims in parallel(eqn)]
        is_free = eqn.primitive.name == "broadcast_in_dim" or any(places)
        return places if is_free else None

    def counted(self, whole: Shape, dtype: DTypeLike, dim: int, at: Blocks | None) -> Array:
        """Returns a block of numbers that count along a dimension."""
        row = lax.iota(dtype, whole[dim])
        if at and at.dim == dim:
            row = self.axis.cut(row, dataclasses.replace(at, dim=0))
        return lax.broadcast_in_dim(row, self.axis.local(whole, at), (dim,))

    def constant(self, value: Tracked, column: int | None = None) -> np.ndarray | None:
        """Returns a value that depends on nothing, or a column of the last dimension of one."""
        if value.eqn is None:
            return None if isinstance(value.array, Tracer) else np.asarray(value.array)
        operands = value.operands
        if column is not None:
            if value.eqn.primitive.name != "concatenate":
                return None
            parts = [v for v in operands for _ in range(v.shape[-1])]
            return self.constant(parts[column]) if parts[column].shape[-1] == 1 else None
        arrays = [x for x in map(self.constant, operands) if x is not None]
        if len(arrays) < len(operands):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(_compat.bind(local(value.eqn, value.shape, arrays), arrays)[0])

    def natural(self, value: Tracked) -> Blocks | None:
        """Returns the blocks in which a value is, or that it has without a word to others."""
        if value.eqn is None:
            return value.at
        if value not in self.naturals:
            places = ((k, self.natural(v)) for k, v in enumerate(value.operands))
            moved = (at and self.after(value.eqn, k, at) for k, at in places)
            self.naturals[value] = next(filter(None, moved), None)
        return self.naturals[value]

    def after(self, eqn: JaxprEqn, k: int, at: Blocks) -> Blocks | None:
        """Returns the blocks of a result whose operand `k` is in these."""
        if eqn.primitive.name == "reshape":
            old, new = type_of(eqn.invars[0]).shape, type_of(eqn.outvars[0]).shape
            return at.reshaped(old, new, self.axis.size)
        return at.moved(parallel(eqn)[k])

    def settled(self, value: Tracked, eqn: JaxprEqn) -> Tracked:
        """Returns a value that waits no longer."""
        if value.eqn is None:
            return value
        at = self.natural(value)
        return Tracked(value.shape, self.array(value, at, eqn), at)

    def at_home(self, value: Tracked, eqn: JaxprEqn) -> Tracked:
        """Returns a value that waits no longer, in blocks of tokens if it was in those of heads."""
        value = self.settled(value, eqn)
        home = value.at.home if value.at else None
        return Tracked(value.shape, self.array(value, home, eqn), home) if home else value

    def as_read(self, value: Tracked) -> Tracked:
        """Returns a value in the blocks for which this scope exchanged it, if it did."""
        for (key, at), (_, array) in self.known[-1].items():
            if key == id(value) and value.at and at:
                return Tracked(value.shape, array, at)
        return value

    # -- what is sent

    @contextlib.contextmanager
    def sending(self, what: str, eqn: JaxprEqn, nbytes: int) -> Generator[None]:
        """Names what an operation sends, and its line, for audits, and counts it."""
        eqn = self.instead or eqn
        eqns = [*(caller for _, caller in self.callers if caller is not None), eqn]
        line = next(filter(None, map(_line_of, reversed(eqns))), "a library")
        path = "/".join(filter(None, map(_compat.scope_of, eqns)))
        place = f"{eqn.primitive.name} ({', '.join(filter(None, (line, path)))})"
        self.regions[-1].sent.append(Received(what, nbytes, place, what == OTHERS))
        scope = "/".join(filter(None, [_compat.scope_of(eqn), self.name_scope, what]))
        with source_info_util.user_context(eqn.source_info.traceback), jax.named_scope(scope):
            yield

    @contextlib.contextmanager
    def scope(self, times: int = 1) -> Generator[None]:
        """A region that JAX traces as a function of its own, and runs so many times. What is sent
        counts if all went well: a loop's body may be traced again."""
        region = Region()
        self.regions.append(region)
        self.known.append({})
        try:
            yield
        finally:
            self.regions.pop()
            self.known.pop()
        self.check(region)
        self.regions[-1].nbytes += region.nbytes
        for sent in region.sent:
            nbytes = sent.nbytes * times
            self.regions[-1].sent.append(dataclasses.replace(sent, nbytes=nbytes, is_limited=False))

    def check(self, region: Region) -> None:
        """Raises for an operation that gathers too much of what its layer computes."""
        totals = Counter[str]()
        for sent in region.sent:
            line = sent.place.partition(", ")[0].rstrip(")") + ")"  # of all layers
            totals[line] += sent.nbytes * sent.is_limited
        for place, nbytes in totals.items():
            if nbytes > self.most_gathered * region.nbytes:
                raise self.refused(place, nbytes, region.nbytes)

    def said(self, each: Received) -> str:
        """Says what an operation receives, and which one it is if it has no rule."""
        return f"all of an operand of {each.place}" if each.what == OTHERS else each.what

    # -- the program

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[ArrayLike],
        inputs: Sequence[Tracked],
        caller: JaxprEqn | None = None,
    ) -> list[Tracked]:
        # From 0.12 on, the first inputs of a user's derivative are its constants.
        names = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(names, [*map(_whole, consts), *inputs], strict=True))

        def read(atom: Atom) -> Tracked:
            return values[atom] if is_var(atom) else _whole(atom.val)

        self.callers.append((jaxpr, caller))
        for eqn in jaxpr.eqns:
            results = self.results(eqn, [read(v) for v in eqn.invars])
            for var, result in zip(eqn.outvars, results, strict=True):
                values[var] = result
                if self.natural(result):
                    self.regions[-1].nbytes += type_of(var).size * type_of(var).dtype.itemsize
        self.callers.pop()
        return [read(v) for v in jaxpr.outvars]

    def results(self, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
        name = eqn.primitive.name
        if name in self.control:
            return self.control[name](self, eqn, operands)
        self.check_axes(eqn)
        shapes = [type_of(v).shape for v in eqn.outvars]
        if name in WAITING and self.may_wait(name, eqn, operands):
            return [Tracked(shapes[0], eqn=eqn, operands=tuple(operands))]
        params = Eqn(eqn)
        begins = name == "slice" and not (any(params.start_indices) or params.strides)
        if begins and operands[0].eqn and (part := self.beginning(operands[0], shapes[0])):
            return [part]
        places = [self.natural(v) for v in operands]
        if not any(places):
            return self.bound(eqn, operands, [None] * len(operands), [None] * len(shapes))
        if name in ("optimization_barrier", *IN_PLACE):
            return self.bound(eqn, operands, places, places)
        after = [at and self.after(eqn, k, at) for k, at in enumerate(places)]
        mixes = [at for at, to in zip(places, after, strict=True) if at and to is None]
        if rule := self.rules(name, bool(mixes)):
            results = rule(self, eqn, operands, next(filter(None, [*mixes, *places])))
            if results is not None:
                return results
        # The largest value stays as it is, and the others follow.
        for k in sorted(range(len(places)), key=lambda k: -int(np.prod(operands[k].shape))):
            if at := after[k]:
                before = [*(self.before(eqn, at) or [None])]
                before[k] = places[k]  # of a reshape there may be no way back
                return self.bound(eqn, operands, before, [at] * len(shapes))
        return self.mixed(eqn, operands)

    def may_wait(self, name: str, eqn: JaxprEqn, operands: Sequence[Tracked]) -> bool:
        shape = type_of(eqn.outvars[0]).shape
        wait = [operand.eqn is not None for operand in operands]
        if name in ("iota", "random_bits"):
            return True
        if name == "broadcast_in_dim":
            return wait[0] or np.prod(shape) > np.prod(operands[0].shape)
        if name == "concatenate":  # of indices
            return any(wait) and all(o.shape[-1] == 1 for o in operands)
        if name == "gather":
            return wait[1] and not wait[0] and operands[0].at is None
        arrays = [o for o, waits in zip(operands, wait, strict=True) if not waits]
        # What grows may wait: each block is computed from less than it has.
        return any(wait) and all(np.prod(o.shape) < np.prod(shape) for o in arrays)

    def beginning(self, value: Tracked, shape: Shape) -> Tracked | None:
        """Returns the first elements of a value that waits, which wait as well."""
        if value.eqn is None or value.shape == shape:
            return value if value.shape == shape else None
        dims = getattr(Eqn(value.eqn), "broadcast_dimensions", range(len(shape)))
        if value.eqn.primitive.name not in ELEMENTWISE | primitives("iota broadcast_in_dim"):
            return None
        parts: list[Tracked] = []
        for operand in value.operands:
            pairs = zip(dims, operand.shape, strict=False)  # a scalar has none
            lengths = tuple(shape[d] if n == value.shape[d] else n for d, n in pairs)
            if (part := self.beginning(operand, lengths)) is None:
                return None
            parts.append(part)
        return dataclasses.replace(value, shape=shape, operands=tuple(parts))

    def bound(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Tracked],
        places: Sequence[Blocks | None],
        results: Sequence[Blocks | None],
        what: str = OTHERS,
    ) -> list[Tracked]:
        """Runs an equation on operands in these blocks. So are its results."""
        pairs = zip(operands, places, strict=True)
        arrays = [self.array(operand, place, eqn, what) for operand, place in pairs]
        shapes = [type_of(v).shape for v in eqn.outvars]
        if any(results):
            eqn = local(eqn, self.axis.local(shapes[0], results[0]), arrays)
        outs = _compat.bind(eqn, arrays)
        return [Tracked(*each) for each in zip(shapes, outs, results, strict=True)]

    def mixed(self, eqn: JaxprEqn, operands: Sequence[Tracked]) -> list[Tracked]:
        """Gathers the operands of an operation that mixes tokens, and cuts its results."""
        dims = {len(v.shape): Blocks(at.dim) for v in operands if (at := self.natural(v))}
        outs = self.bound(eqn, operands, [None] * len(operands), [None] * len(eqn.outvars))

        def in_blocks(value: Tracked) -> Tracked:
            at = dims.get(len(value.shape))
            has_tokens = at and value.shape[at.dim] >= self.axis.size
            return self.cut(value.array, at if has_tokens else None)

        return list(map(in_blocks, outs))

    def cut(self, array: Array, at: Blocks | None) -> Tracked:
        """Returns an array that is whole, in these blocks."""
        return Tracked(array.shape, self.axis.cut(array, at) if at else array, at)

    def check_axes(self, eqn: JaxprEqn) -> None:
        """Raises for a loss that speaks over the axis itself."""
        named = (getattr(effect, "name", None) for effect in eqn.effects)
        if self.axis.name in named:
            raise ValueError(
                f"the loss names the mesh axis {self.axis.name!r} ({eqn.primitive.name}), and "
                f"sequence={self.axis.name!r} has zerojax split sequences over it. Write the loss "
                "for whole sequences; or leave sequence= out, and pass "
                f"axis=('data', {self.axis.name!r})."
            )

    def readers(self, jaxpr: Jaxpr) -> Readings:
        """Returns the equations that read each variable, and as which operand."""
        if jaxpr not in self.all_readers:
            readers = self.all_readers[jaxpr] = {}
            for eqn in jaxpr.eqns:
                for k, atom in enumerate(eqn.invars):
                    if is_var(atom):
                        readers.setdefault(atom, []).append((eqn, k))
        return self.all_readers[jaxpr]

    # -- random numbers

    def random_bits(self, value: Tracked, eqn: JaxprEqn, at: Blocks | None, shape: Shape) -> Array:
        """Returns a block of the bits that one device would draw."""
        key, whole = self.array(value.operands[0], None, eqn), value.shape
        is_threefry = str(jax.random.key_impl(key)) == "threefry2x32"
        by_element = bool(jax.config.values["jax_threefry_partitionable"]) and is_threefry
        width = 8 * type_of(eqn.outvars[0]).dtype.itemsize
        if at is None or not by_element or key.shape or width > 32 or math.prod(whole) >= 2**32:
            bits = _compat.bind(eqn, [key])[0]
            return bits if at is None else self.axis.cut(bits, at)
        number = jnp.zeros(shape, jnp.uint32)  # of each element, in the whole value
        for dim, length in enumerate(whole):
            number = number * np.uint32(length) + self.counted(whole, jnp.uint32, dim, at)
        words = [jnp.full(shape, word) for word in jax.random.key_data(key)]
        a, b = threefry2x32_p.bind(*words, number * 0, number)
        return (a ^ b).astype(f"uint{width}")

    def refused(self, place: str, nbytes: int, total: int) -> ValueError:
        axis, share = self.axis.name, nbytes / total if total else math.inf
        computed = f"{share:.1%} of the {human_bytes(total)} that its layer computes"
        most = math.ceil(share * 10) / 10 if total else "math.inf"
        remedy = next((text for name, text in REMEDIES.items() if place.startswith(name)), LISTED)
        return ValueError(
            f"{place} mixes tokens, and sequence={axis!r} has no rule for it. It would gather "
            f"{human_bytes(nbytes)}, {computed if total else 'and nothing would stay split'}; "
            f"most_gathered={self.most_gathered:.0%}. {remedy.format(size=self.axis.size)}, or "
            f"allow it: sequence=zerojax.Sequences({axis!r}, most_gathered={most})."
        )


LISTED = "Write it in operations that docs/axes.md lists"
HEADS_DIVIDE = (
    "Repeat keys and values until {size} devices divide their heads, jnp.repeat(k, n, axis=2)"
)
REMEDIES = {
    "dot_product_attention": HEADS_DIVIDE,
    "pallas_call": f"{HEADS_DIVIDE}; of a kernel with scratch memory say which axes are parallel, "
    "dimension_semantics=('parallel', ...)",
    "reshape": "Cut tokens into a multiple of {size} chunks",
}


def local(eqn: JaxprEqn, shape: Shape, arrays: Sequence[Array | np.ndarray]) -> JaxprEqn:
    """Returns an equation whose first result has another shape, that of a block."""

    def local_sizes(sizes: Sequence[int]) -> Sequence[int]:
        if eqn.primitive.name not in ("slice", "dynamic_slice", "gather"):
            return shape
        triples = zip(sizes, type_of(eqn.invars[0]).shape, arrays[0].shape, strict=True)
        return [block if size == whole else size for size, whole, block in triples]

    return with_sizes(eqn, local_sizes)


def _whole(array: ArrayLike) -> Tracked:
    return Tracked(jnp.shape(array), array)


def _line_of(eqn: JaxprEqn) -> str:
    """Returns the innermost line of an equation that is of no library, 'file.py:12', or ''."""
    libraries = ("site-packages", f"{os.sep}zerojax{os.sep}")
    lines = (line for line in _compat.lines_of(eqn) if not any(part in line for part in libraries))
    return next(lines, "")
