"""How steps split sequences over a mesh axis: `_passes/sequences.py` does it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sequences:
    """How a step splits sequences over a mesh axis. The loss is written for whole ones.

    Arguments:
        axis: the mesh axis. ZeRO shards over it, too.
        most_gathered: the most that an operation, which needs other tokens than its device has, may
            gather, as a share of the activations of a layer. More is an error.

    Example:
        >>> mesh = zerojax.mesh(data=2, sequence=4)
        >>> params = {"w": jnp.ones((1024, 8))}
        >>> plan = zerojax.plan({"params": params}, mesh=mesh, sequence=zerojax.Sequences())
        >>> print(zerojax.shard_batch(np.ones((2, 64)), plan).sharding.spec)
        P('data', 'sequence')
    """

    axis: str = "sequence"
    most_gathered: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            raise TypeError(
                f"Sequences(axis={self.axis!r}) must name one axis of the mesh. Pass "
                "axis='sequence' and mesh=zerojax.mesh(data=2, sequence=4), say."
            )
        share = self.most_gathered
        if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
            raise ValueError(
                f"Sequences(most_gathered={share!r}) must be a share of a layer's activations. "
                "Pass 0.1, or math.inf for no limit."
            )


def as_sequences(sequence: Sequences | str | None) -> Sequences | None:
    """Returns the `Sequences` that `sequence=` stands for."""
    return sequence if isinstance(sequence, Sequences | None) else Sequences(sequence)
