"""The options of a plan."""

import dataclasses
from collections.abc import Mapping, Sequence

import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax._declared import Options, option
from zerojax._plan.expert import Experts
from zerojax._plan.offload import Offload
from zerojax._plan.precision import Precision, check_precision
from zerojax._plan.rule import DEFAULT_MIN_SHARD_SIZE
from zerojax._plan.sequence import Sequences
from zerojax._state.refusals import check_tx


def _stage(stage: object) -> object:
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage must be 0, 1, 2 or 3, got {stage!r}: 0 replicates, 1 shards the optimizer "
            "state, 2 gradients too, 3 parameters too."
        )
    return stage


TX = option(None, "the optimizer, for states that do not carry one.", check=check_tx)


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
        None,
        """the devices; default, the mesh whose Explicit axes arrays have in their types, or that
        of `jax.set_mesh`, or else all devices on one axis `data`.""",
    )
    axis: str | Sequence[str] | None = option(
        None,
        """the mesh axis or axes that the batch is split over; default, the only one or `data`, and
        with `groups` all.""",
    )
    sequence: Sequences | str | None = option(
        None,
        """one more mesh axis, along which steps split the sequences of a batch: "sequence" of
        `zerojax.mesh(data=2, sequence=4)`. ZeRO shards over it, too. The loss stays that of whole
        sequences. `zerojax.Sequences` says how.""",
    )
    experts: Experts | Mapping[str, str] | None = option(
        None,
        """one more mesh axis that splits the rows of the batch, and a path regex of the parameters
        that are experts: `{"expert": "experts|w[123]"}` of `zerojax.mesh(data=4, expert=2)`. Each
        device along it has other experts at every stage, and ZeRO shards them over the other
        axes.""",
    )
    groups: Mapping[str, str | Sequence[str]] | None = option(
        None,
        """the axes that shard each kind of array, if not all axes of the batch do:
        `{"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}`. Axes that shard
        parameters must shard gradients, and those the optimizer state. The stage decides for kinds
        that you leave out; devices along the other axes are replicas.""",
    )
    overrides: Mapping[str, PartitionSpec] | None = option(
        None,
        """`{path regex: PartitionSpec}` for parameters, whose paths are such as
        `params/dense/kernel`; the optimizer state follows.""",
    )
    min_shard_size: int = option(
        DEFAULT_MIN_SHARD_SIZE, "parameters with fewer elements stay replicated."
    )
    stacked: str | tuple[()] | None = option(
        None,
        """a path regex for parameters whose first dimension counts layers, or () if there are none;
        default, those whose shapes suggest it.""",
    )
    pad: bool = option(
        True,
        """shard leaves even if the devices divide none of their dimensions: they are stored with
        zeros at the end of one. Losses, optimizers and checkpoints see the shapes without them, as
        `zerojax.unpad(state)` does. False replicates such leaves.""",
    )
    precision: Precision | None = option(
        None,
        """dtypes: parameters are stored in `param=`, wider copies of them in the optimizer state
        in `master=`, its moments in `moments=`; steps compute in `compute=` and reduce in
        `reduce=`.""",
        check=check_precision,
    )
    offload: Offload | str | Sequence[str] | None = option(
        None,
        """what stays in host memory between steps: "opt_state", ("opt_state", "params"), or a
        `zerojax.Offload`, which says how much of it. A step copies it to the devices a part at a
        time.""",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateOptions(PlanOptions):
    """How a state is placed that may lack an optimizer."""

    tx: optax.GradientTransformation | None = TX
