# pyright: strict
"""Splits a jaxpr into a *prefix*, which needs only weights, and a *main part*.

The prefix gathers shards and computes everything that comes from weights only (casts, transposes,
weight normalisation). It is cheap to repeat, and its results are as large as full weights. So
backward runs it again, and forward keeps none of it (but see `Split.read_last`). The main part
reads the *frontier* from it.
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import (
    Atom,
    Eqn,
    Inliner,
    Keys,
    Var,
    alive,
    is_call,
    is_var,
    jitted,
    reads,
    running,
    type_of,
    unique,
)
from zerojax._kernel.pieces import (
    CONST,
    WEIGHT,
    InputKind,
    Kind,
    Loop,
    Nested,
    Op,
    Readers,
    Scope,
    Shard,
    Split,
    is_cast,
    reads_of,
    shards_read,
)
from zerojax._kernel.travel import Cut
from zerojax._warn import warn


def split(
    jaxpr: Jaxpr,
    consts: Sequence[ArrayLike],
    kinds: Sequence[InputKind],
    *,
    pull: bool,
    checkpointed: bool = False,
) -> Split:
    """Splits `jaxpr`, whose inputs are of `kinds`: a `Cut` for each sharded one.

    With `pull`, the weights of a remat are gathered outside of it (a loop body gathers everything
    first); without, the remat gathers for itself if it can. `checkpointed` says that the main part
    will run under `jax.checkpoint`.
    """
    splitter = Splitter(jaxpr, pull)
    for var, kind in zip(jaxpr.invars, kinds, strict=True):
        splitter.kinds[var] = Shard(var, kind) if isinstance(kind, Cut) else kind
    splitter.inliner.constants.update(zip(jaxpr.constvars, consts, strict=True))
    main: list[Op] = []
    eqns = splitter.inline(jaxpr.eqns)
    splitter.find_readers(eqns, [splitter.inliner.named(v) for v in jaxpr.outvars])
    for eqn in eqns:
        splitter.visit(eqn, main, checkpointed)
    outvars = [splitter.gathered_once(splitter.inliner.named(v)) for v in jaxpr.outvars]
    main = alive(main, outvars, reads_of)
    read = [v for op in main for v in reads_of(op)]
    wanted = unique([*read, *filter(is_var, outvars)])
    made = {v for op in main for v in op.outvars}
    frontier = [v for v in wanted if splitter.kind(v) in (WEIGHT, CONST) and v not in made]
    prefix = alive(splitter.prefix, frontier, reads)
    needed = {v for eqn in prefix for v in reads(eqn)} | set(frontier)
    gathers = {v: s for v, s in splitter.gathers.items() if v in needed}
    return Split(
        invars=list(jaxpr.invars),
        kinds=[splitter.kinds[v] for v in jaxpr.invars],
        constants=splitter.inliner.constants,
        gathers=gathers,
        prefix=prefix,
        frontier=frontier,
        main=main,
        outvars=outvars,
    )


class Splitter:
    """Visits the equations of one jaxpr, and sorts them into prefix and main part."""

    def __init__(self, jaxpr: Jaxpr, pull: bool) -> None:
        self.pull = pull
        self.inliner = Inliner()
        self.kinds: dict[Var, Kind] = {}
        self.gathers: dict[Var, Shard] = {}
        self.gathered: dict[Shard, Var] = {}
        self.prefix: list[JaxprEqn] = []
        self.readers = Readers()
        # Of scopes: equal ones, such as layers in a Python loop, share one split.
        self.splits: dict[Hashable, Split] = {}
        self.keys = Keys(exact=True)
        self.codes: dict[int, tuple[str, Jaxpr]] = {}
        # How often each jaxpr is called, by its id, and what to expand in place of repeated calls.
        calls = filter(is_call, _compat.every_eqn(jaxpr))
        self.calls = Counter(id(_compat.inner_jaxpr(call)[0]) for call in calls)
        self.hoisted: dict[Hashable, Jaxpr] = {}

    # -- kinds of variables

    def kind(self, atom: Atom) -> Kind:
        if not is_var(atom) or atom in self.inliner.constants:
            return CONST
        return self.kinds.get(atom)

    def is_weights(self, atom: Atom) -> bool:
        kind = self.kind(atom)
        return isinstance(kind, Shard) or kind == WEIGHT

    def gathered_once(self, atom: Atom) -> Atom:
        """Returns `atom`. A shard is gathered, once for all later uses."""
        kind = self.kind(atom)
        if not isinstance(kind, Shard):
            return atom
        if kind not in self.gathered:
            var = _compat.fresh(atom)
            self.gathered[kind] = var
            self.gathers[var] = kind
            self.kinds[var] = WEIGHT
        return self.gathered[kind]

    # -- the equations

    def inline(self, eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """Expands the calls that take a weight, so that there is only one level to read."""
        touched = set(filter(self.is_weights, self.kinds))
        kinds = self.kinds | dict.fromkeys(touched, WEIGHT)

        def expands(eqn: JaxprEqn) -> JaxprEqn | bool:
            found = [kinds.get(v, self.kind(v)) if is_var(v) else CONST for v in eqn.invars]
            if None not in found:
                kinds.update(dict.fromkeys(eqn.outvars, WEIGHT if WEIGHT in found else CONST))
            if touched.isdisjoint(reads(eqn)):
                return False
            touched.update(eqn.outvars)
            return is_call(eqn) and self.opened(eqn, found)

        return list(self.inliner.flat(eqns, expands))

    # [Note: calls that repeat]
    # Calls of a jitted layer (Flax's `nn.jit`) share one jaxpr, which JAX differentiates and lowers
    # once. Expanded, each is traced anew. So only what needs nothing but weights comes out of such
    # a call, and the rest is a call again, of one jaxpr for all; XLA inlines it. JAX returns
    # operands of a call that backward needs as they came, so backward still keeps no weight.

    def opened(self, call: JaxprEqn, kinds: Sequence[Kind]) -> JaxprEqn | bool:
        """Returns whether to expand a call with such operands, or another call in its place."""
        jaxpr, _ = _compat.inner_jaxpr(call)
        count = self.calls[id(jaxpr)]
        if count < 2 or not {None, WEIGHT} <= {*kinds}:
            return count > 0  # otherwise it is the rest of another call
        key = id(jaxpr), *kinds
        if key not in self.hoisted:
            self.hoisted[key] = _hoisted(call, kinds)
        return running(call, self.hoisted[key])

    def find_readers(self, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> None:
        # `visit` takes these remats apart. Then their equations read, and not they themselves.
        apart = _compat.REMAT if self.pull else ()
        self.readers.find([e for e in eqns if e.primitive.name not in apart], outvars)

    # -- one equation

    def visit(self, eqn: JaxprEqn, main: list[Op], checkpointed: bool) -> None:
        # A remat that was taken apart may have renamed the operands of this equation.
        eqn = self.inliner.resolved(eqn)
        name = eqn.primitive.name
        kinds = [self.kind(v) for v in eqn.invars]
        if is_cast(eqn) and (cast := _cast_shard(eqn, kinds[0])):
            # Cast the shard, not the weight: the gather then moves the narrower dtype.
            self.kinds[eqn.outvars[0]] = cast
        elif name == "sharding_constraint" and isinstance(kinds[0], Shard):
            # It names axes of the user's own. These often shard the shard already (Flax's `unbox`
            # of a partitioned stack). Others are for the full weight: to obey it here, the engine
            # would have to gather the full stack of a loop.
            spec = getattr(Eqn(eqn).sharding, "spec", PartitionSpec())
            cut = kinds[0].cut.asked_for(spec)
            self.kinds[eqn.outvars[0]] = dataclasses.replace(kinds[0], cut=cut)
        elif shards := self.readers.viewed(eqn, kinds[0] if kinds else None):
            self.kinds.update(zip(eqn.outvars, shards, strict=True))
        elif name in _compat.REMAT and any(map(self.is_weights, eqn.invars)):
            main.append(self.scope_in_loop(eqn) if self.pull else self.scope(eqn))
        elif name == "scan" and self.scans_weights(eqn):
            main.append(self.loop(eqn))
        else:
            self.visit_plain(eqn, main, checkpointed)

    def visit_plain(self, eqn: JaxprEqn, main: list[Op], checkpointed: bool) -> None:
        invars = [self.gathered_once(v) for v in eqn.invars]
        kinds = {self.kind(v) for v in invars}
        eqn = eqn.replace(invars=invars)
        if kinds <= {WEIGHT, CONST} and not _compat.has_side_effects(eqn):
            self.prefix.append(eqn)
            for var in eqn.outvars:
                self.kinds[var] = WEIGHT if WEIGHT in kinds else CONST
            # [Note: constants under checkpoint] An equation that needs only constants, such as a
            # mask made of iotas, goes into the prefix, because weights may need its result. Under
            # jax.checkpoint it goes into the main part too, which keeps nothing for backward
            # anyway. In the frontier the mask would be an input of the checkpoint, behind its
            # barrier: an array in memory instead of part of a fusion.
            if checkpointed and WEIGHT not in kinds:
                main.append(eqn)
        else:
            main.append(eqn)

    def scope(self, eqn: JaxprEqn) -> Scope:
        """Returns a remat that gathers for itself, and again in backward."""
        operands = list(eqn.invars)
        inner = self.split_remat(eqn, operands)
        gathered = {shard.root for shard in inner.gathers.values()}
        pairs = zip(inner.invars, operands, strict=True)
        shared = [var in gathered and len(self.readers.of(v)) > 1 for var, v in pairs]
        if any(shared):  # gathered out here, once for all its uses
            operands = [
                self.gathered_once(v) if several else v
                for v, several in zip(operands, shared, strict=True)
            ]
            inner = self.split_remat(eqn, operands)
        shards = [k if isinstance(k := self.kind(v), Shard) else v for v in operands]
        name = "/".join(filter(None, (_compat.scope_of(eqn), self.code(eqn)[0])))
        return Scope(inner, shards, list(eqn.outvars), **Eqn(eqn).options, name=name)

    def split_remat(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> Split:
        (_, jaxpr), (_, consts) = self.code(eqn), _compat.inner_jaxpr(eqn)
        kinds = [_inner_kind(self.kind(v)) for v in operands]
        key = self.keys.jaxpr(jaxpr, consts), _alike(jaxpr, kinds), *Eqn(eqn).options.values()
        if key not in self.splits:
            self.splits[key] = split(jaxpr, consts, kinds, pull=False, checkpointed=True)
        return self.splits[key]

    def code(self, eqn: JaxprEqn) -> tuple[str, Jaxpr]:
        """Returns the name scope that all equations of a remat share, and its jaxpr without it;
        read only once if layers share one jaxpr."""
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        if id(jaxpr) not in self.codes:
            self.codes[id(jaxpr)] = _compat.without_outer_scope(jaxpr)
        return self.codes[id(jaxpr)]

    def scope_in_loop(self, eqn: JaxprEqn) -> Scope:
        """Returns a remat whose weights the loop body around it gathers: its prefix is empty."""
        # Visits its equations as if the loop body had them. Those that need only weights join the
        # body's prefix, where the loop gathers; the others become the main part of the remat.
        ops: list[Op] = []
        inside = self.inline(self.inliner.expand(eqn))
        self.find_readers(inside, ())
        for inner in inside:
            self.visit(inner, ops, checkpointed=True)
        made_here = {v for op in ops for v in op.outvars}
        outvars = [v for v in eqn.outvars if v in made_here]
        ops = alive(ops, outvars, reads_of)
        made = {v for op in ops for v in op.outvars}
        read = unique(v for op in ops for v in reads_of(op) if v not in made)
        kinds = (self.kinds[shard.root] for shard in shards_read(ops))
        roots = unique(kind for kind in kinds if isinstance(kind, Shard))
        operands: list[Shard | Atom] = [*read, *roots]
        inner = Split(
            invars=[*read, *(shard.root for shard in roots)],
            kinds=[*[None] * len(read), *roots],
            constants={},
            gathers={},
            prefix=[],
            frontier=[],
            main=ops,
            outvars=[*outvars],
        )
        return Scope(inner, operands, outvars, **Eqn(eqn).options)

    def scans_weights(self, eqn: JaxprEqn) -> bool:
        # JAX itself differentiates what a loop writes to a `jax.new_ref`.
        of = Eqn(eqn)
        return any(map(self.is_weights, of.parts(eqn.invars)[2])) and not of.takes_refs

    def loop(self, eqn: JaxprEqn) -> Loop:
        num_consts, num_carry = map(len, Eqn(eqn).parts(eqn.invars)[:2])
        first_x = num_consts + num_carry
        operands: list[Shard | Atom] = []
        kinds: list[InputKind] = []
        for index, atom in enumerate(eqn.invars):
            kind = self.kind(atom)
            if isinstance(kind, Shard) and index >= first_x and kind.cut.fixed > 0:
                operands.append(kind)
                kinds.append(kind.cut.of_one_layer())
                continue
            if isinstance(kind, Shard) and index >= first_x:
                _warn_sharded_layers(kind.cut.path, type_of(atom).shape)
            full = self.gathered_once(atom)
            is_carry = num_consts <= index < first_x
            operands.append(full)
            kinds.append(None if is_carry else _inner_kind(self.kind(full)))
        jaxpr, consts = _compat.inner_jaxpr(eqn)
        return Loop(
            split=split(jaxpr, consts, kinds, pull=True),
            operands=operands,
            outvars=list(eqn.outvars),
            num_consts=num_consts,
            num_carry=num_carry,
            **Eqn(eqn).options,
            name=_compat.scope_of(eqn),
        )


def _hoisted(call: JaxprEqn, kinds: Sequence[Kind]) -> Jaxpr:
    """Returns the jaxpr of a call, where what needs more than weights is a call of its own. One
    that gathers, has side effects or closes over arrays stays as it is."""
    jaxpr, consts = _compat.inner_jaxpr(call)
    inner = split(jaxpr, consts, [*map(_inner_kind, kinds)], pull=False, checkpointed=True)
    eqns = [op for op in inner.main if not isinstance(op, Nested)]
    if len(eqns) < len(inner.main) or inner.constants or _compat.has_side_effects(jaxpr):
        return jaxpr
    invars = [*inner.frontier, *(v for v, k in zip(jaxpr.invars, kinds, strict=True) if k is None)]
    outvars = [v for eqn in eqns for v in eqn.outvars if v in inner.outvars]
    rest = jitted(_compat.make_jaxpr(eqns, invars, outvars), call)
    return _compat.make_jaxpr([*inner.prefix, rest], jaxpr.invars, inner.outvars)


def _cast_shard(eqn: JaxprEqn, kind: Kind) -> Shard | None:
    """Returns a shard after a cast between floats, if the gather can do the cast."""
    if not isinstance(kind, Shard) or kind.cut.use_dtype is not None:
        return None
    new, old = type_of(eqn.outvars[0]).dtype, jnp.dtype(kind.cut.dtype)
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)):
        return None
    if new.itemsize == old.itemsize:
        return None
    change = {"dtype": new} if new.itemsize < old.itemsize else {"use_dtype": new}
    return dataclasses.replace(kind, cut=dataclasses.replace(kind.cut, **change))


def _inner_kind(kind: Kind) -> InputKind:
    """Returns the kind of an operand inside the body that receives it."""
    if isinstance(kind, Shard):
        return kind.cut
    return WEIGHT if kind in (WEIGHT, CONST) else kind


def _alike(jaxpr: Jaxpr, kinds: Sequence[InputKind]) -> Hashable:
    """Returns the kinds of inputs without their paths, which only messages about loops need."""
    loops = any(eqn.primitive.name == "scan" for eqn in _compat.every_eqn(jaxpr))
    named = [dataclasses.replace(k, path="") if isinstance(k, Cut) else k for k in kinds]
    return tuple(kinds if loops else named)


def _warn_sharded_layers(path: str, shape: Sequence[int]) -> None:
    warn(
        f"{path}, a stack of shape {tuple(shape)}, is scanned along dimension 0 and sharded along "
        "it too, so the step gathers the full stack before the loop. Name it to the plan: "
        f"zerojax.plan(..., stacked={path!r}) shards the dimension after the layers. For loops "
        f"within loops, pass overrides={{{path!r}: PartitionSpec(None, None, 'data')}}."
    )
