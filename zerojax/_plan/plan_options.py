"""The options of a plan."""

import dataclasses
from collections.abc import Mapping, Sequence

import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax._declared import Options, option
from zerojax._kernel.places import DEFAULT_MIN_SHARD_SIZE
from zerojax._plan.offload import Offload
from zerojax._plan.precision import Precision, check_precision
from zerojax._state.refusals import check_tx


def _stage(stage: object) -> object:
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage must be 0, 1, 2 or 3, got {stage!r}: 0 replicates, 1 shards the optimizer "
            "state, 2 gradients too, 3 parameters too."
        )
    return stage


TX = option(None, "the optimizer, for states that do not carry theirs.", check=check_tx)


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """How a state is placed."""

    stage: int = option(
        3,
        "0 replicates all; 1 shards the optimizer state, 2 gradients too, 3 parameters too.",
        check=_stage,
    )
    _: dataclasses.KW_ONLY
    mesh: Mesh | None = option(
        None, "the devices; default, all of them along one axis `data`. Axes must be Auto."
    )
    axis: str | Sequence[str] | None = option(
        None,
        """the mesh axis or axes that the batch is split over; default, the only one or `data`,
        with `groups` all of them.""",
    )
    groups: Mapping[str, str | Sequence[str]] | None = option(
        None,
        """the axes over which each kind of array is sharded, where that is not over all axes of
        the batch: `{"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}`. What shards
        parameters shards gradients too, and what shards these the optimizer state. Kinds left out
        are sharded as the stage says; devices along the other axes are replicas.""",
    )
    overrides: Mapping[str, PartitionSpec] | None = option(
        None,
        """`{path regex: PartitionSpec}` for parameters, matched against paths such as
        `params/dense/kernel`; the optimizer state follows.""",
    )
    min_shard_size: int = option(
        DEFAULT_MIN_SHARD_SIZE, "parameters with fewer elements stay replicated."
    )
    stacked: str | None = option(
        None,
        """a path regex for parameters whose first dimension counts layers; default, what the
        shapes suggest.""",
    )
    pad: bool = option(
        True,
        """shard leaves of which the number of devices divides no dimension: they rest with zeros
        at the end of one. Losses and optimizers see the shapes without them, and so do
        checkpoints; `zerojax.unpad(state)` shows them. Where False, such leaves are
        replicated.""",
    )
    precision: Precision | None = option(
        None,
        """dtypes: `param=` stores parameters in one, `master=` keeps wider copies of them in the
        optimizer state, whose moments rest in `moments=`; steps compute in `compute=` and reduce
        in `reduce=`.""",
        check=check_precision,
    )
    offload: Offload | str | Sequence[str] | None = option(
        None,
        """what rests in host memory between steps, from where a step brings it to the devices a
        part at a time: "opt_state", ("opt_state", "params"), or a `zerojax.Offload`, which says
        how much of it.""",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateOptions(PlanOptions):
    """How a state is placed that may not carry its optimizer."""

    tx: optax.GradientTransformation | None = TX
