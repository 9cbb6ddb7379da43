"""What each device of a step sends to the others, as a checksum for each collective.

Gains the name of the device whose fault spread: a wrong number in one loss is, after the sum over
the devices, in the state of all of them. Two runs of one step agree up to the first collective to
which some device sends something else. Reads the gradients once more.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import Atom, Eqn, Inliner, is_call, is_var
from zerojax._types import is_key

GOLDEN = np.uint32(0x9E3779B1)  # odd, so that multiplying by it loses nothing
Closed: TypeAlias = tuple[Jaxpr, Sequence[ArrayLike]]  # a jaxpr and its constants
Witnessed: TypeAlias = tuple[list[Array], list[Array]]  # outputs, and checksums


@dataclasses.dataclass(frozen=True)
class Witness:
    """Runs the jaxpr of a step, and sums up the bits of each operand of its collectives.

    A program under `shard_map` returns its checksums as an array with a row for each device.
    Checksums of a loop are sums over its turns.
    """

    mesh: Mesh

    def labels(self, jaxpr: Jaxpr) -> list[str]:
        """Returns the names of the collectives, in the order of their checksums."""
        labels = []
        for eqn in filter(_sends, _flat(jaxpr)[0]):
            if body := self.body(eqn):
                labels += self.labels(body[0])
            elif _is_of_device(eqn):
                labels.append(_label(eqn))
        return labels

    def run(self, closed: Closed, inputs: Sequence[Array]) -> Witnessed:
        jaxpr, consts = closed
        eqns, inliner = _flat(jaxpr)
        variables, sums = [*jaxpr.invars, *jaxpr.constvars], list[Array]()
        env = inliner.constants | dict(zip(variables, [*inputs, *consts], strict=True))

        def read(atom: Atom) -> Array:
            return env[atom] if is_var(atom) else atom.val  # type: ignore

        for eqn in eqns:
            values, sends = list(map(read, eqn.invars)), _sends(eqn)
            if sends and (body := self.body(eqn)):
                run = getattr(self, f"run_{eqn.primitive.name}")
                with jax.named_scope(str(eqn.source_info.name_stack) or eqn.primitive.name):
                    outs, more = run(eqn, body, values)
                sums += more
            else:
                if sends and _is_of_device(eqn):
                    # Not fused with what makes an operand, so that this stays as it is.
                    operands = lax.optimization_barrier(values)
                    sums.append(sum(map(of_bits, operands), jnp.uint32(0)))
                outs = _compat.bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(inliner.named(v)) for v in jaxpr.outvars], sums

    def body(self, eqn: JaxprEqn) -> Closed | None:
        """Returns the jaxpr whose collectives have checksums of their own."""
        match eqn.primitive.name:
            case "scan" | "while":
                return _compat.inner_jaxpr(eqn)
            case "shard_map" if not _is_of_device(eqn):
                is_of_step = Eqn(eqn).mesh.shape == self.mesh.shape
                return _compat.inner_jaxpr(eqn) if is_of_step else None

    def run_shard_map(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        params, manual = Eqn(eqn), Eqn(eqn).newly_manual_axes
        rows = PartitionSpec(tuple(axis for axis in self.mesh.axis_names if axis in manual))

        def of_device(*inputs: Array) -> tuple[list[Array], Array]:
            outs, sums = self.run(body, inputs)
            return outs, jnp.array(sums, jnp.uint32)[None]

        outs, sums = jax.shard_map(
            of_device,
            mesh=params.mesh,
            in_specs=params.in_specs,
            out_specs=(list(params.out_specs), rows),
            axis_names=manual,
            check_vma=False,
        )(*values)
        return outs, [lax.with_sharding_constraint(sums, NamedSharding(self.mesh, rows))]

    def run_scan(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        fixed, init, xs = Eqn(eqn).parts(values)

        def turn(carry: list, xs: list) -> tuple[list, Witnessed]:
            outs, sums = self.run(body, [*fixed, *carry, *xs])
            return outs[: len(init)], (outs[len(init) :], sums)

        carry, (ys, sums) = lax.scan(turn, init, xs, **Eqn(eqn).options)
        return [*carry, *ys], [jnp.sum(turns, axis=0, dtype=jnp.uint32) for turns in sums]

    def run_while(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        condition = _compat.opened(Eqn(eqn).cond_jaxpr)
        of_condition, of_body, init = Eqn(eqn).parts(values)

        def turn(carry: Witnessed) -> Witnessed:
            outs, sums = self.run(body, [*of_body, *carry[0]])
            return outs, list(map(jnp.add, carry[1], sums))

        def goes_on(carry: Witnessed) -> Array:
            return self.run(condition, [*of_condition, *carry[0]])[0][0]

        _, sums = jax.eval_shape(lambda *inputs: self.run(body, inputs), *of_body, *init)
        zeros = [jnp.zeros(each.shape, each.dtype) for each in sums]
        return lax.while_loop(goes_on, turn, (init, zeros))


def _flat(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], Inliner]:
    """Returns the equations, with those of calls that send in place of the calls."""
    inliner = Inliner()
    return list(inliner.flat(jaxpr.eqns, lambda eqn: is_call(eqn) and _sends(eqn))), inliner


def _sends(eqn: JaxprEqn) -> bool:
    """Whether an equation speaks to other devices, at any depth."""
    if inner := _compat.inner_jaxprs(eqn):
        return any(map(_sends, (each for jaxpr in inner for each in jaxpr.eqns)))
    return _compat.names_an_axis(eqn) and eqn.primitive.name != "axis_index"


def _is_of_device(eqn: JaxprEqn) -> bool:
    """Whether an equation is of the program of one device, under `shard_map`."""
    return bool(eqn.ctx.cur_abstract_mesh.manual_axes)


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
