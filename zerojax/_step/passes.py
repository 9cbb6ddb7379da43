"""The passes that a step runs over its loss, in order; a plain step runs none.

A pass stands before `layered`, after which outputs are those of all microbatches.
"""

from collections.abc import Sequence

from zerojax._kernel.travel import Codec
from zerojax._loss.batch import REPLICATED, Microbatches
from zerojax._passes.layered import layered
from zerojax._passes.loss import Loss, Pass
from zerojax._passes.means import has_counts, with_counts_first
from zerojax._passes.one_device import as_one_device
from zerojax._passes.rolled import may_roll, roll
from zerojax._plan.plan import Plan
from zerojax._specs import axes_size
from zerojax._step.step_options import LossOptions


def rewritten(
    loss: Loss,
    plan: Plan,
    options: LossOptions,
    microbatches: Microbatches,
    codecs: Sequence[tuple[Codec, Codec]],
) -> Loss:
    """Returns a loss after the passes that the options of a step ask for."""
    passes: list[Pass] = []
    schedule, is_sharded = options.schedule, axes_size(plan.mesh, plan.groups.params) > 1
    # Before layers are rolled up: that leaves no call of a mean, and puts some into loops.
    if options.accumulate > 1 and has_counts(loss):
        passes.append(with_counts_first)
    if may_roll(loss, schedule.roll, is_sharded):
        passes.append(lambda loss: roll(loss, codecs, schedule.roll, is_sharded))
    if options.is_layered:
        is_split = [role.kind != REPLICATED for role in microbatches.roles]
        must = schedule.update == "backward"
        passes.append(lambda loss: layered(loss, microbatches.count, is_split, must))

    def run() -> Loss:
        result = loss
        for each in passes:
            result = each(result)
        return result

    return as_one_device(run, plan.mesh, plan.batch_axes) if passes else loss
