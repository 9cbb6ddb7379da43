"""What each device of a step sends to the others, as a checksum for each collective.

Gains the name of the device whose fault spread: a wrong number in one loss is, after the sum over
the devices, in the state of all of them. Two runs of one step agree up to the first collective to
which some device sends something else. Costs 90 lines of code, and reads the gradients once more.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._kernel.device import DeviceStep
from zerojax._kernel.jaxprs import Atom, Inliner, is_call, is_var
from zerojax._types import PyTree, is_key

GOLDEN = np.uint32(0x9E3779B1)  # odd, so that multiplying by it loses nothing


def watched(program: DeviceStep, labels: list[str]) -> Callable[..., tuple]:
    """Returns the program of all devices together, whose first result is a pair: the loss, and the
    checksums of what each device sends, a row for each. Tracing it sets `labels` to what they are.
    """
    first, *others = program.out_specs()

    def run(*args: PyTree) -> tuple:
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
        inputs, jaxpr = [*jax.tree.leaves(args), *closed.consts], closed.jaxpr
        variables, watch = [*jaxpr.invars, *jaxpr.constvars], Watch()
        outs, sums = watch.run(jaxpr, dict(zip(variables, inputs, strict=True)))
        labels[:] = watch.labels
        loss, *rest = jax.tree.structure(shapes).unflatten(outs)
        row = jnp.stack(sums) if sums else jnp.zeros(0, jnp.uint32)
        return (loss, row[None]), *rest

    return jax.shard_map(
        run,
        mesh=program.mesh,
        in_specs=program.in_specs(),
        out_specs=((first, PartitionSpec(program.axes)), *others),
        axis_names=set(program.axes),
        check_vma=False,
    )


@dataclasses.dataclass
class Watch:
    """Runs a jaxpr, and sums up the bits of each operand of its collectives."""

    labels: list[str] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Jaxpr, env: dict[Any, Any]) -> tuple[list, list[Array]]:
        """Returns the outputs and the checksums. Those of a loop are sums over its turns."""
        inliner, sums = Inliner(), list[Array]()
        eqns = list(inliner.flat(jaxpr.eqns, lambda eqn: is_call(eqn) and _sends(eqn)))
        env |= inliner.constants

        def read(atom: Atom) -> ArrayLike:
            return env[atom] if is_var(atom) else atom.val  # type: ignore

        for eqn in eqns:
            values = list(map(read, eqn.invars))
            if not _sends(eqn):
                outs = _compat.bind(eqn, values)
            elif eqn.primitive.name == "scan":
                outs, own = self.scanned(eqn, values)
                sums += own
            else:
                # Not fused with what makes an operand, so that this stays as it is.
                found = lax.optimization_barrier([x for x in values if np.size(x)])
                if found:
                    sums.append(jnp.sum(jnp.stack([of_bits(x) for x in found]), dtype=jnp.uint32))
                    self.labels.append(_label(eqn))
                outs = _compat.bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(inliner.named(v)) for v in jaxpr.outvars], sums

    def scanned(self, eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list, list[Array]]:
        consts, carried = _compat.scan_counts(eqn.params)
        jaxpr, closed = _compat.inner_jaxpr(eqn)
        fixed, rest = values[:consts], list(values[consts:])
        init, xs = rest[:carried], rest[carried:]
        before = len(self.labels)

        def body(carry: list, xs: list) -> tuple[list, tuple[list, list[Array]]]:
            del self.labels[before:]  # JAX may trace a body twice
            inputs = [*fixed, *carry, *xs, *closed]
            env = dict(zip([*jaxpr.invars, *jaxpr.constvars], inputs, strict=True))
            outs, sums = self.run(jaxpr, env)
            return outs[:carried], (outs[carried:], sums)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        with jax.named_scope(str(eqn.source_info.name_stack) or "loop"):
            carry, (ys, sums) = lax.scan(body, init, xs, **options)
        return [*carry, *ys], [jnp.sum(turns, dtype=jnp.uint32) for turns in sums]


def _sends(eqn: JaxprEqn) -> bool:
    """Whether an equation speaks to other devices, at any depth."""
    if not _compat.names_an_axis(eqn):
        return False
    if inner := _compat.inner_jaxprs(eqn):
        return any(map(_sends, (one for jaxpr in inner for one in jaxpr.eqns)))
    return eqn.primitive.name != "axis_index"


def _label(eqn: JaxprEqn) -> str:
    """Returns the name of a collective, and of the parameters that the engine names it after."""
    stack = str(eqn.source_info.name_stack)
    scope = re.sub(r"\b(jvp|transpose|vmap)\(|\)", "", stack).strip("/")
    when = " in backward" if "transpose(" in stack else ""
    return f"{eqn.primitive.name}{scope and f' of {scope}'}{when}"


def of_bits(value: Array) -> Array:
    """Returns a checksum of all bits of an array, which differs if one element does."""
    if is_key(value):
        value = jax.random.key_data(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return of_bits(jnp.real(value)) + GOLDEN * of_bits(jnp.imag(value))
    words = _words(value)
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * np.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    # Each step can be undone, so that a changed element changes its term, and the sum.
    mixed = (words ^ (place * GOLDEN)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def _words(value: Array) -> Array:
    """Returns the bits of an array in unsigned integers of 32 bits, two for each of 64."""
    dtype = value.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        narrow = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, jnp.uint32)
        value = lax.bitcast_convert_type(value, narrow)
    elif dtype.itemsize == 8:
        value = lax.bitcast_convert_type(value, jnp.uint32)
    return value.astype(jnp.uint32)
