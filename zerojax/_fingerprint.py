"""Plans, values and programs as text that is the same in every process of a run."""

import concurrent.futures
import enum
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import params_of
from zerojax._types import PyTree, is_key


def of_shapes(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    return ", ".join(f"{jax.numpy.result_type(x)}{list(np.shape(x))}" for x in leaves)


def of_values(named: Iterable[tuple[str, PyTree]]) -> dict[str, str]:
    """Returns the text of each value; see `of_value`."""
    values = dict(named)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        sums = threads.map(of_value, values.values())
        return {f"the values of {name}": sum_ for name, sum_ in zip(values, sums, strict=True)}


def of_value(value: PyTree) -> str:
    """Returns the number in a value, or a checksum of several.

    If other processes have other parts of the value, only its type and place can be the same.
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if not value.is_fully_replicated:
            return f"{of_shapes(value)} {show(value.sharding)}"
        value = value.addressable_data(0)
    array = np.ascontiguousarray(jax.random.key_data(value) if is_key(value) else value)
    if array.size == 1:
        return str(array.reshape(-1)[0])
    return f"{of_shapes(array)} of checksum {zlib.crc32(array.view(np.uint8).reshape(-1)):08x}"


def of_program(closed: jex_core.ClosedJaxpr) -> str:
    """Returns a jaxpr, one equation a line, with everything that must agree between processes."""
    return "\n".join(_lines(closed.jaxpr, closed.consts, ""))


def _lines(jaxpr: jex_core.Jaxpr, consts: Sequence[ArrayLike], indent: str) -> Iterator[str]:
    number = itertools.count()
    names = {var: f"v{next(number)}" for var in (*jaxpr.constvars, *jaxpr.invars)}
    yield from (f"{indent}constant {of_value(const)}" for const in consts)

    def name(atom: jex_core.Var | jex_core.Literal) -> str:
        if isinstance(atom, jex_core.Literal):
            return of_value(atom.val)
        return names.setdefault(atom, f"v{next(number)}")

    for eqn in jaxpr.eqns:
        shown = " ".join(f"{key}={show(v)}" for key, v in params_of(eqn) if v is not None)
        inputs, outputs = (" ".join(map(name, atoms)) for atoms in (eqn.invars, eqn.outvars))
        types = " ".join(str(var.aval).lstrip("~") for var in eqn.outvars)  # weak ones are alike
        scope = eqn.source_info.name_stack
        yield f"{indent}{scope} {outputs}:{types} = {eqn.primitive.name} {inputs} {shown}"
        for one, its_consts in _compat.closed_jaxprs(eqn):
            yield from _lines(one, its_consts, indent + "  ")
    yield f"{indent}return " + " ".join(map(name, jaxpr.outvars))


PLAIN = (type(None), bool, int, float, complex, str, np.dtype, enum.Enum, PartitionSpec)


def show(value: object) -> str:
    """Returns an equation's parameter as text; for a function, say, only its type."""
    if isinstance(value, PLAIN):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(show, value))})"
    if isinstance(value, set | frozenset):  # their order differs between processes
        return f"{{{', '.join(sorted(map(show, value)))}}}"
    if isinstance(value, NamedSharding):
        return f"{value.spec} over {show(value.mesh)}"
    if isinstance(value, Mesh | jax.sharding.AbstractMesh):
        return str(dict(value.shape))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return of_value(value)
    return type(value).__name__
