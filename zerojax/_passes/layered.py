"""Layered accumulation, `order="layers"`: every microbatch runs through a layer before the first
one runs through the next.

Gains time where gathering is slow: a step gathers each layer once, and not once for each
microbatch. A 7.5B step on 64 H100s with 8 microbatches and network cards of 50, 12.5, 6.25 and
3.125 GB/s takes 4446, 4451, 4460 and 4486 ms in place of 4098, 4280, 7152 and 14018 ms, as
`benchmarks/layered.py` forecasts. It keeps the activations of all microbatches for backward: 15.6
GiB of temporary memory in place of 5.8, or 6.8 with `activations="host"`. Costs 220 lines of code.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import Atom, Eqn, Inliner, Var, alive, inferred, is_var, reads, type_of
from zerojax._kernel.pieces import CONST, WEIGHT
from zerojax._passes.loss import Loss
from zerojax._passes.one_device import typed
from zerojax._types import PyTree, wide
from zerojax._warn import warn

# [Note: layered accumulation]
# This takes a loss apart at its loops over layers. The equations between two loops are a *segment*,
# which a scan maps over the microbatches; so are those of a `jax.checkpoint` in a loop. An
# iteration of a loop runs all microbatches through a layer, so it gathers that layer once, and
# reduces the sum of its gradients once. Values that come from weights only stay outside of the
# scans, where the engine finds them. The engine runs the result as any other loss, and each
# microbatch computes what it would have computed by itself.


class _NoLayersError(Exception):
    """Why the microbatches of a loss cannot run side by side."""


STACK_THEM = "Stack the layers (jax.lax.scan, nn.scan)"
MICROBATCH = "microbatch"  # the kind of a variable that differs by microbatch; see `pieces.py`
# Goes around what a segment computes of one microbatch.
Wrap = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


def layered(loss: Loss, count: int, is_split: Sequence[bool], must: bool) -> Loss:
    """Returns the loss on all of `count` microbatches; `is_split` says which arguments differ
    between them. It takes what differs stacked, and returns all outputs stacked.

    A loss without a loop over layers stays that on one microbatch, with a note, or, if it `must`
    be layered, raises an error.
    """
    kinds = [WEIGHT] * len(loss.params)
    kinds += [MICROBATCH if each else CONST for each in is_split]
    kinds += [CONST] * (len(loss.jaxpr.invars) - len(kinds))

    def of_all(*values: Array) -> list[Array]:
        # Without a checkpoint, backward would keep all results of segments, such as logits, of all
        # microbatches.
        return _Layered((loss.jaxpr, ()), values, kinds, count, jax.checkpoint).run()

    def stacked(var: Var, kind: str) -> jax.ShapeDtypeStruct:
        one = type_of(var)
        shape = (count, *one.shape) if kind == MICROBATCH else one.shape
        return jax.ShapeDtypeStruct(shape, one.dtype, weak_type=one.weak_type)

    try:
        if not _has_layers(loss.jaxpr, kinds):
            raise _NoLayersError("the loss has no scan over stacked parameters. " + STACK_THEM)
        shapes = map(stacked, loss.jaxpr.invars, kinds)
        shapes = typed(list(shapes), jax.sharding.get_abstract_mesh())
        return loss.retraced(of_all, *shapes, layered=True)
    except _NoLayersError as error:
        if must:
            raise ValueError(
                f"update='backward' of {count} microbatches is for order='layers', and {error}, or "
                "pass Schedule(update='auto')."
            ) from None
        note = f"order='layers' is left out: {error}, or pass Schedule(order='microbatches')"
        warn(f"{note}.")
        return loss.noting(note)


class _Layered:
    """Runs the equations of one jaxpr for all microbatches; `wrap` goes around its segments."""

    def __init__(
        self,
        closed: tuple[Jaxpr, Sequence[ArrayLike]],
        values: Sequence[Array],
        kinds: Sequence[str],
        count: int,
        wrap: Wrap,
    ) -> None:
        jaxpr, consts = closed
        self.count, self.wrap, self.inliner = count, wrap, Inliner()
        self.env: dict[Var, Any] = dict(zip(jaxpr.invars, values, strict=True))
        self.kinds = dict(zip(jaxpr.invars, kinds, strict=True))
        self.inliner.constants.update(zip(jaxpr.constvars, consts, strict=True))
        self.eqns = list(self.inliner.flat(jaxpr.eqns))
        self.outvars = [self.inliner.named(v) for v in jaxpr.outvars]
        self.segment: list[JaxprEqn] = []

    def run(self) -> list[Array]:
        """Returns the outputs of all microbatches, stacked."""
        for at, eqn in enumerate(self.eqns):
            eqn = self.inliner.resolved(eqn)
            kinds = list(map(self.kind, eqn.invars))
            if MICROBATCH in kinds and _contains_layers(eqn, kinds):
                self.flush(at, self.wrap)
                self.write(eqn.outvars, self.with_layers(eqn, kinds), MICROBATCH)
            elif MICROBATCH in kinds and eqn.primitive.name in _compat.REMAT:
                # Outside of loops, segments are in a checkpoint anyway. On its own, this one would
                # return its results, such as logits, of all microbatches.
                is_inside = self.wrap is not jax.checkpoint
                if is_inside:
                    self.flush(at, self.wrap)
                for inner in self.inliner.flat(self.inliner.expand(eqn)):
                    self.visit(inner)
                if is_inside:
                    self.flush(at + 1, functools.partial(jax.checkpoint, **Eqn(eqn).options))
            else:
                self.visit(eqn)
        self.flush(len(self.eqns), self.wrap)
        return [self.stacked(self.inliner.named(v)) for v in self.outvars]

    # -- variables

    def kind(self, atom: Atom) -> str:
        return self.kinds.get(atom, CONST) if is_var(atom) else CONST

    def value(self, atom: Atom) -> Any:
        if not is_var(atom):
            return atom.val
        return self.env[atom] if atom in self.env else self.inliner.constants[atom]

    def stacked(self, atom: Atom) -> Array:
        """Returns a value of each microbatch, a copy for each where it is the same."""
        value = jnp.asarray(self.value(atom), type_of(atom).dtype)
        is_stacked = self.kind(atom) == MICROBATCH
        return value if is_stacked else jnp.broadcast_to(value, (self.count, *value.shape))

    def write(self, outvars: Sequence[Var], values: Sequence[Any], kind: str) -> None:
        self.env.update(zip(outvars, values, strict=True))
        self.kinds.update(dict.fromkeys(outvars, kind))

    def read_from(self, at: int) -> set[Var]:
        """Returns the outputs and the variables that the equations from `at` on read."""
        rest = map(self.inliner.resolved, self.eqns[at:])
        outvars = map(self.inliner.named, self.outvars)
        return set(filter(is_var, outvars)).union(*map(reads, rest))

    # -- segments

    def visit(self, eqn: JaxprEqn) -> None:
        """Runs an equation that reads no microbatch, and adds any other to the segment."""
        eqn = self.inliner.resolved(eqn)
        kinds = list(map(self.kind, eqn.invars))
        if MICROBATCH in kinds or _compat.has_side_effects(eqn):
            self.kinds.update(dict.fromkeys(eqn.outvars, MICROBATCH))
            self.segment.append(eqn)
            return
        kind = _strongest(kinds)
        self.write(eqn.outvars, _compat.bind(eqn, list(map(self.value, eqn.invars))), kind)
        # Results of constants only, such as a mask, are cheaper to make again than to read.
        if kind == CONST:
            self.segment.append(eqn)

    def flush(self, at: int, wrap: Wrap) -> None:
        """Runs the segment for all microbatches, and keeps what equations from `at` on read."""
        later = self.read_from(at)
        made = [v for eqn in self.segment for v in eqn.outvars]
        outs = [v for v in made if v in later and self.kind(v) == MICROBATCH]
        eqns = alive(self.segment, outs, reads)
        self.segment = []
        if not eqns:
            return
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in reads(eqn) if v not in made)
        groups = WEIGHT, CONST, MICROBATCH
        by_kind = [[v for v in read if self.kind(v) == kind] for kind in groups]

        def one(*values: Sequence[Any]) -> list[Array]:
            env = dict(zip(itertools.chain(*by_kind), itertools.chain(*values), strict=True))
            for eqn in eqns:
                operands = [env[v] if is_var(v) else v.val for v in eqn.invars]
                operands = [x() if isinstance(x, Partial) else x for x in operands]
                env.update(zip(eqn.outvars, _compat.bind(eqn, operands), strict=True))
            return [env[v] for v in outs]

        weights, consts, parts = ([self.value(v) for v in some] for some in by_kind)
        # JAX 0.10 removes a checkpoint that prints.
        if not any(map(_compat.has_side_effects, eqns)):
            one = wrap(one)
        weights = list(map(_shared, weights))
        _, values = lax.scan(
            lambda _, part: (None, one(weights, consts, part)), None, parts, length=self.count
        )
        self.env.update(zip(outs, values, strict=True))

    # -- equations with a loop over layers inside

    def with_layers(self, eqn: JaxprEqn, kinds: Sequence[str]) -> list[Array]:
        name = eqn.primitive.name
        if name == "scan":
            return self.loop(eqn, kinds)
        if name not in _compat.REMAT:
            raise _NoLayersError(
                f"a scan over stacked parameters is inside {name}, whose microbatches cannot run "
                "side by side. Take the scan out of it"
            )
        inner = _compat.inner_jaxpr(eqn)

        def inside(values: Sequence[Array]) -> list[Array]:
            return _Layered(inner, values, kinds, self.count, self.wrap).run()

        return jax.checkpoint(inside, **Eqn(eqn).options)([self.value(v) for v in eqn.invars])

    def loop(self, eqn: JaxprEqn, kinds: Sequence[str]) -> list[Array]:
        """Returns the outputs of a scan whose body runs all microbatches."""
        body = _compat.inner_jaxpr(eqn)
        fixed, carried, rows = Eqn(eqn).parts(eqn.invars)
        of_fixed, _, of_rows = Eqn(eqn).parts(kinds)
        consts, carry = list(map(self.value, fixed)), list(map(self.stacked, carried))
        values = zip(map(self.value, rows), of_rows, strict=True)
        xs = [jnp.swapaxes(x, 0, 1) if kind == MICROBATCH else x for x, kind in values]
        kinds = [*of_fixed, *[MICROBATCH] * len(carry), *of_rows]

        def layer(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            inputs = [*consts, *carry, *xs]
            # The user decides what backward keeps of each microbatch, as in any loop.
            outs = _Layered(body, inputs, kinds, self.count, lambda f: f).run()
            return outs[: len(carry)], outs[len(carry) :]

        carry, ys = lax.scan(layer, carry, xs, **Eqn(eqn).options)
        return [*carry, *(jnp.swapaxes(y, 0, 1) for y in ys)]


# -- weights that all microbatches read


def _shared(value: Array) -> Any:
    """Returns a weight for all microbatches to read.

    A narrow one becomes a function of itself and of its total. Nothing computes with the total,
    whose wider dtype is that of the sum of the microbatches' gradients, as of microbatches in turn.
    """
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and wide(value.dtype) != value.dtype
    return Partial(_picked, value, _total(value, wide(value.dtype))) if is_narrow else value


# The residuals of both are empty arrays that carry a dtype: JAX does not take a dtype itself.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(value: Array, dtype: DTypeLike) -> Array:
    """Returns zeros, whose gradient becomes that of `value`."""
    return jnp.zeros(value.shape, dtype)


@jax.custom_vjp
def _picked(value: Array, total: Array) -> Array:
    """Returns `value`, whose gradient goes to `total`."""
    return value


_total.defvjp(
    lambda value, dtype: (jnp.zeros(value.shape, dtype), jnp.zeros((0,), value.dtype)),
    lambda _, like, grad: (grad.astype(like.dtype),),
)
_picked.defvjp(
    lambda value, total: (value, jnp.zeros((0,), total.dtype)),
    lambda like, grad: (None, grad.astype(like.dtype)),
)


# -- where loops over layers are


def _strongest(kinds: Sequence[str]) -> str:
    """Returns the kind of an equation's outputs, from those of its inputs."""
    return next((kind for kind in (MICROBATCH, WEIGHT) if kind in kinds), CONST)


def _has_layers(jaxpr: Jaxpr, kinds: Sequence[str]) -> bool:
    """Whether microbatches run through a scan over weights, at any depth."""
    loops: list[bool] = []

    def rule(eqn: JaxprEqn, kinds: list[str]) -> list[str]:
        loops.append(MICROBATCH in kinds and _contains_layers(eqn, kinds))
        return [_strongest(kinds)] * len(eqn.outvars)

    inferred(jaxpr, kinds, CONST, rule)
    return any(loops)


def _contains_layers(eqn: JaxprEqn, kinds: Sequence[str]) -> bool:
    """Whether an equation is a loop over layers, or has one inside."""
    if eqn.primitive.name == "scan":
        consts, carry, xs = Eqn(eqn).parts(kinds)
        if WEIGHT in xs and not Eqn(eqn).takes_refs:
            return True
        kinds = [*consts, *[MICROBATCH] * len(carry), *xs]
    # Of a `cond`, the operands after its predicate are the inputs of each branch.
    inner = [jaxpr for jaxpr in _compat.inner_jaxprs(eqn) if len(jaxpr.invars) <= len(kinds)]
    return any(_has_layers(jaxpr, kinds[len(kinds) - len(jaxpr.invars) :]) for jaxpr in inner)
