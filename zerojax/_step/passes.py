"""The passes that a step runs over its loss, in order; a plain step runs none.

A pass stands before `layered`, after which outputs are those of all microbatches.
"""

from collections.abc import Sequence

from zerojax._kernel.travel import Codec
from zerojax._loss.batch import REPLICATED, Microbatches
from zerojax._passes.experts import keep_experts
from zerojax._passes.layered import layered
from zerojax._passes.loss import Loss, Pass
from zerojax._passes.means import has_counts, over_rows, with_counts_first
from zerojax._passes.one_device import as_one_device
from zerojax._passes.rolled import may_roll, roll
from zerojax._passes.sequences import split_sequences
from zerojax._plan.plan import Plan
from zerojax._specs import axes_size
from zerojax._step.step_options import LossOptions


def rewritten(
    loss: Loss,
    plan: Plan,
    options: LossOptions,
    microbatches: Microbatches,
    codecs: Sequence[tuple[Codec, Codec]],
    have_rows: Sequence[bool] = (),
) -> Loss:
    """Returns a loss after the passes that the options of a step ask for. Of its aux, some leaves
    have rows."""
    passes: list[Pass] = []
    schedule, is_sharded = options.schedule, axes_size(plan.mesh, plan.groups.params) > 1
    is_split = [role.kind != REPLICATED for role in microbatches.roles]
    # First, because it reads the loss as a user writes it.
    if (how := plan.sequence) and (blocks := plan._splits.blocks) > 1:
        dims = [role.tokens for role in microbatches.roles]
        split = how.axis, blocks, dims, have_rows, how.most_gathered
        passes.append(lambda loss: split_sequences(loss, *split))
    # Before layers are rolled up: that leaves no call of a mean, and puts some into loops.
    if options.accumulate > 1 and has_counts(loss.jaxpr):
        passes.append(lambda loss: with_counts_first(loss, is_split))
    if (who := plan.experts) and (size := plan.mesh.shape[who.axis]) > 1:
        apart = [leaf.experts for leaf in plan.params]
        kept = who.axis, size, apart, who.room, plan.batch_axes
        passes.append(lambda loss: keep_experts(loss, *kept))
    if may_roll(loss, schedule.roll, is_sharded):
        passes.append(lambda loss: roll(loss, codecs, schedule.roll, is_sharded))
    if options.is_layered:
        must = schedule.update == "backward"
        passes.append(lambda loss: layered(loss, microbatches.count, is_split, must))

    def run() -> Loss:
        result = loss
        for each in passes:
            result = each(result)
        return result

    with over_rows(plan._splits.tokens):
        return as_one_device(run, plan.mesh, plan.batch_axes) if passes else loss
