"""A traced loss, as a pass takes and returns it."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import unclosed
from zerojax._kernel.places import LeafPlan

Stack = tuple[int, ...]  # the positions of the parameters that it stacks, a layer's each


@dataclasses.dataclass(frozen=True)
class Feed:
    """How the parameters of a state become those of a loss: stacks of some, then single ones.

    All are positions in the state's parameters.
    """

    stacks: tuple[Stack, ...]
    single: tuple[int, ...]

    def fed(self, values: Sequence[Array], dtypes: Sequence[DTypeLike]) -> list[Array]:
        """Returns the parameters of the loss: stacks in these dtypes."""
        pairs = zip(self.stacks, dtypes, strict=False)
        stacks = [jnp.stack([values[at].astype(dtype) for at in stack]) for stack, dtype in pairs]
        return [*stacks, *(values[at] for at in self.single)]

    def returned(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the state's parameters."""
        each: dict[int, Any] = dict(zip(self.single, grads[len(self.stacks) :], strict=True))
        for stack, grad in zip(self.stacks, grads, strict=False):
            for at, part in zip(stack, _layers_of(grad), strict=True):
                each[at] = each[at] + part if at in each else part
        return [each[at] for at in sorted(each)]

    @property
    def are_whole(self) -> list[bool]:
        """Whether the gradients of each stack are all that its parameters have."""
        times = Counter(at for stack in [*self.stacks, self.single] for at in stack)
        return [all(times[at] == 1 for at in stack) for stack in self.stacks]


def _layers_of(stack: Array) -> list[Array]:
    """Returns the layers of a stack.

    XLA compiles fusions that are alike once. One with a slice at a constant is like no other: 300
    slices of small weights take 11 s to compile on CPUs, and 2 s this way.
    """
    layer = functools.partial(lax.dynamic_index_in_dim, stack, allow_negative_indices=False)
    numbers = lax.optimization_barrier(list(map(jnp.int32, range(len(stack)))))
    return [layer(number, keepdims=False) for number in numbers]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as code of one device, on one microbatch of its rows. A pass returns another one.

    The inputs of `jaxpr`, which has no constvars, are the parameters, of which `params` are the
    plans; the arguments; what the loss closes over; the counts that `counter` returns; and
    `constants`. The counter takes the same as the loss, but for the parameters and the counts, on
    each microbatch before the first one runs. Over mesh axes of the user's own, shapes are whole.

    The outputs are the loss, which may be scaled (`dynamic_scale`), the leaves of its aux, and one
    for each name in `metrics`. Steps return their means over devices and microbatches, in float32
    at least, among their metrics, so the names must be new. `out_dims` has, for each leaf of the
    aux, the dimension along which a device's output is a block of its sequences; () means none. If
    it is `layered`, the loss takes what differs by microbatch stacked, and returns all outputs
    stacked. `notes` are for the user, where the step is printed.
    """

    jaxpr: Jaxpr
    params: tuple[LeafPlan, ...] = ()
    feed: Feed = Feed((), ())
    constants: tuple[ArrayLike, ...] = ()
    counter: Jaxpr | None = None
    layered: bool = False
    metrics: tuple[str, ...] = ()
    out_dims: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()

    def noting(self, *notes: str) -> "Loss":
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def retraced(self, function: Callable[..., Any], *types: Any, **changes: Any) -> "Loss":
        """Returns the loss that a function of its inputs computes: one that runs the old jaxpr with
        more outputs, say. The inputs may have other `types`. Call it where passes run."""
        types = types or tuple(v.aval for v in self.jaxpr.invars)
        jaxpr, consts = unclosed(jax.make_jaxpr(function)(*types))
        constants = (*self.constants, *consts)
        jaxpr = _compat.without_unread(jaxpr)
        return dataclasses.replace(self, jaxpr=jaxpr, constants=constants, **changes)


Pass: TypeAlias = Callable[[Loss], Loss]
