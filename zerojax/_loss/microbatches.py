"""The arguments of a loss on one device, by microbatches."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax._loss.batch import BATCH, KEY, Role, split
from zerojax._plan.precision import cast_floats


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """The `count` microbatches of a device: how arguments with these roles reach each of them."""

    roles: Sequence[Role]
    count: int

    def prepared(
        self, args: Sequence[Array], axes: tuple[str, ...], compute: DTypeLike | None
    ) -> list[Array]:
        """Casts floats to the dtype to compute in, and folds the device's index into keys."""
        device = lax.axis_index(axes)
        pairs = zip(cast_floats(list(args), compute), self.roles, strict=True)
        return [
            jax.random.fold_in(value, device) if role.kind == KEY else value
            for value, role in pairs
        ]

    def parts(self, args: Sequence[Array]) -> list[Array]:
        """Splits a device's part of the batch, so that nothing moves between devices."""
        pairs = zip(args, self.roles, strict=True)
        return [split(value, role.dim, self.count) for value, role in pairs if role.kind == BATCH]

    def args_of(self, args: Sequence[Array], parts: Sequence[Array], index: Array) -> list[Array]:
        """Returns the arguments of microbatch `index`, with its `parts`."""
        found = iter(parts)

        def arg(value: Array, role: Role) -> Array:
            if role.kind == BATCH:
                return next(found)
            return jax.random.fold_in(value, index) if role.kind == KEY else value

        return [arg(value, role) for value, role in zip(args, self.roles, strict=True)]

    def args_of_all(self, args: Sequence[Array]) -> list[Array]:
        """Returns the arguments of all microbatches: stacked, where they differ.

        Those of one alone are as they are, and its keys are those of a loop without microbatches.
        """
        if self.count == 1:
            return list(args)
        found = iter(self.parts(args))

        def arg(value: Array, role: Role) -> Array:
            if role.kind == BATCH:
                return next(found)
            if role.kind != KEY:
                return value
            return lax.map(lambda i: jax.random.fold_in(value, i), jnp.arange(self.count))

        return [arg(value, role) for value, role in zip(args, self.roles, strict=True)]

    @property
    def differ(self) -> list[bool]:
        """Whether each argument differs by microbatch."""
        return [role.kind in (BATCH, KEY) for role in self.roles]
