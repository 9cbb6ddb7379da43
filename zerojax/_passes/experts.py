"""Has a loss compute with experts that stay apart over a mesh axis, whatever the model."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Sequence

from jax import Array, lax

from zerojax import _compat
from zerojax._jaxprs import type_of
from zerojax._passes.loss import Loss


def keep_experts(loss: Loss, axis: str, size: int, dims: Sequence[int | None]) -> Loss:
    """Returns a loss of which each device of a mesh axis has its block of the experts.

    `dims` says which dimension of each parameter counts experts; None has none. The last block may
    end with experts of zeros. The loss gathers the experts of all devices when it starts.
    """
    variables = loss.jaxpr.invars
    types, places = [v.aval for v in variables], dict[int, int]()
    for at, dim in enumerate(dims):
        if dim is not None:
            shape = list(type_of(variables[at]).shape)
            places[at], shape[dim] = dim, -(-shape[dim] // size)
            types[at] = types[at].update(shape=tuple(shape))

    def code(*arrays: Array) -> list[Array]:
        values = list(arrays)
        for at, dim in places.items():
            every = lax.all_gather(values[at], axis, axis=dim, tiled=True)
            values[at] = lax.slice_in_dim(every, 0, type_of(variables[at]).shape[dim], axis=dim)
        return _compat.run_jaxpr(loss.jaxpr, values)

    return loss.retraced(code, *types)
