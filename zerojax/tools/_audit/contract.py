"""The contract of each stage's compiled program, and the rules that find where one breaks it.

`promises` says how often each sharded parameter may be gathered; the rest of the contract is in the
rules. A finding is one line: the operation, the parameter, the likely cause, the remedy.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator

from zerojax._plan import mesh as _mesh
from zerojax._plan.placement import Axes, beyond
from zerojax._plan.plan import LeafPlan, Plan
from zerojax._state.state import OPT_STATE, OTHER
from zerojax._table import human_bytes
from zerojax._wire import messages as _messages, rows as _rows
from zerojax.tools._audit import transfers as _transfers
from zerojax.tools._audit.measured import Measured, Part, Traffic
from zerojax.tools._hlo.schedule import REDUCING

SMALL = 4096  # bytes that may always be reduced: losses, norms, statistics
BIG_ALL_REDUCE = 2**20  # allowed where no plan says what is sharded
BIG_GATHER = 2**20  # from here on a gather in a loop should not be synchronous
WIDE = {"f32", "f64"}
NARROW = {"bf16", "f16"}
OPTIMIZER_SCOPE = "optimizer"  # what full-matrix optimizers send is their own business

UNNAMED = (
    "no argument of the program has the name of one of the plan's parameters, so its contract "
    "cannot be checked. Let the step take the state as one argument, with a name of its own: "
    "jax.jit(lambda state, batch: ...)."
)


@dataclasses.dataclass(frozen=True)
class Promise:
    """A stage's promise of a sharded parameter: how often a step gathers it, and over which axes.

    `replicas` are the axes over which devices update the same shard, so that shards of the gradient
    are all-reduced over them.
    """

    leaf: LeafPlan
    stage: int
    gathers: float  # at most, in times its size
    far: Axes  # crossed once, by a gather over these alone
    far_gathers: float  # at most: the last layer of a loop that prefetches crosses them again
    replicas: Axes

    @property
    def size(self) -> int:
        """The elements that a gather of it moves: with the padding."""
        return _sent(self.leaf)

    @property
    def logical_size(self) -> int:
        """The elements that it has as a loss sees it."""
        return math.prod(self.leaf.shape)


def promises(plan: Plan, accumulate: int) -> dict[str, Promise]:
    """Returns what the plan's stage promises of each sharded parameter.

    At stage 3 every microbatch gathers twice, for forward and for backward; each of the two loops
    may gather one layer more, at its end. Over the axes that a step does not keep it sharded over,
    it is gathered once: on its way near, or after the update.
    """
    found = {}
    for leaf in plan.params:
        if leaf.update.dim is None:
            continue
        layers = leaf.shape[0] if leaf.stacked else math.inf
        gathers = accumulate * (2 + 2 / layers) if leaf.near.dim is not None else 0
        far = beyond(leaf.update.axes, leaf.near.axes)
        replicas = beyond(plan.batch_axes, leaf.update.axes)
        far_gathers = 1 + 1 / layers if leaf.near.axes else 1
        found[leaf.path] = Promise(leaf, plan.stage, gathers, far, far_gathers, replicas)
    return found


def findings(report: Measured) -> list[str]:
    """Returns what breaks the contract; without a plan, what no stage does."""
    found = [*_exchanges(report), *_warnings(report)]
    if report.plan is None:
        return [*found, *_all_reduces(report, {})]
    if not report.memory.parameters and report.plan.params:
        return [UNNAMED, *found]
    promised = promises(report.plan, report.accumulate)
    return [
        *_placement(report),
        *(_donation(report) if report.trains else ()),
        *_all_reduces(report, promised),
        *(_reduced(report, promised) if report.trains else ()),
        *_synchronous(report),
        *_gathers(report, report.plan, promised),
        *_dtypes(report, promised),
        *_kept(report),
        *_transfers.findings(report),
        *found,
    ]


# -- the rules


def _exchanges(report: Measured) -> Iterator[str]:
    for one in _of_kinds(report, "all-to-all", "ragged-all-to-all", "collective-permute"):
        if one.wire_bytes > SMALL and _is_ours(one, report.plan) and not _is_known(one):
            yield (
                f"{one.kind} {one.name} moves {human_bytes(one.total_bytes)} ({one.serves}): no "
                "stage needs one, so activations or weights change their layout. Look for a "
                "with_sharding_constraint or a batch that is not sharded along its first dimension."
            )


def _all_reduces(report: Measured, promised: dict[str, Promise]) -> Iterator[str]:
    all_replicated = report.plan is not None and not promised  # stage 0; XLA may join gradients
    for one in _of_kinds(report, "all-reduce"):
        for part in one.parts if _is_ours(one, report.plan) else ():
            promise = _gradient_in(part, promised)
            if promise is not None and not _is_within(one, promise.replicas):
                yield (
                    f"all-reduce {one.name} sums the full gradient of {promise.leaf.path} "
                    f"({part.array}); stage {promise.stage} promises a reduce-scatter, half the "
                    "bytes. Take gradients with zerojax.value_and_grad or zerojax.train_step, and "
                    "use no psum or pmean of gradients of your own."
                )
            elif all_replicated and part.paths:
                continue
            elif part.nbytes > _most_reduced(part, report.plan):
                yield (
                    f"all-reduce {one.name} sums {part.array}, {human_bytes(part.nbytes)} "
                    f"({one.serves}): larger than any statistic a loss should reduce. Look for "
                    "activations summed over the data axis, or weights sharded without a gather."
                )


def _reduced(report: Measured, promised: dict[str, Promise]) -> Iterator[str]:
    reducing = [t for t in report.traffic if t.kind in REDUCING or _is_known(t, "transpose(")]
    reaches = any(path in promised for one in reducing for path in one.paths)
    if promised and not reaches and all(one.wire_bytes <= SMALL for one in reducing):
        first = next(iter(promised))
        yield (
            f"no collective reduces the gradient of {first}, or of any other parameter: each "
            "device trains on its own part of the batch. Take gradients with "
            "zerojax.value_and_grad or zerojax.train_step."
        )


def _synchronous(report: Measured) -> Iterator[str]:
    # In the loop over microbatches alone is the first gather of each, which nothing goes before.
    outer = int(report.accumulate > 1)
    for one in _of_kinds(report, "all-gather") if report.backend == "gpu" else ():
        if not one.asynchronous and len(one.loops) > outer and one.wire_bytes > BIG_GATHER:
            yield (
                f"all-gather {one.name} ({one.serves}) is synchronous inside a loop over layers: "
                "nothing hides its time. Use prefetch=1 and the default compiler options. If both "
                "are set, XLA ran out of memory to overlap it."
            )


def _gathers(report: Measured, plan: Plan, promised: dict[str, Promise]) -> Iterator[str]:
    sent: dict[tuple[str, Axes], float] = collections.defaultdict(float)
    for one in _of_kinds(report, "all-gather"):
        for part in one.parts if _is_ours(one, plan) else ():
            for promise in _promises_of(part, promised):
                leaf, gathered = promise.leaf, part.elements * one.group
                far = promise.far if _is_within(one, promise.far) else ()
                near = _mesh.axes_size(plan.mesh, leaf.near.axes) if far else 1
                sent[leaf.path, far] += gathered * one.trips * near / promise.size
                if leaf.stacked and leaf.rest.dim is not None and gathered >= promise.size:
                    yield _gathered_at_once(one, part, leaf)
    for (path, far), times in sent.items():
        most = promised[path].far_gathers if far else promised[path].gathers
        over = f" over {' x '.join(far)}" if far and promised[path].leaf.near.axes else ""
        if times > most + 0.01:
            yield (
                f"{path} is gathered {times:.3g} times a step{over}; stage {plan.stage} promises "
                f"at most {most:.3g}. Look for uses in several jax.checkpoint regions, or a gather "
                "inside a loop that does not need it there."
            )


def _gathered_at_once(one: Traffic, part: Part, stack: LeafPlan) -> str:
    return (
        f"all-gather {one.name} gathers all {stack.shape[0]} layers of {stack.path} at once "
        f"({part.array} per device), outside of the loop over them. Scan over the stack itself: do "
        "not reshape, index or cast all of it before the loop. If the first dimension counts "
        "something other than layers, name the stacks that there are: "
        "zerojax.plan(..., stacked='<their paths>')."
    )


def _dtypes(report: Measured, promised: dict[str, Promise]) -> Iterator[str]:
    """Finds gathers in 32 bits of what is used in 16; XLA:CPU widens whatever it moves."""
    if report.backend != "gpu" or not _computes_narrow(report):
        return
    for one in _of_kinds(report, "all-gather"):
        for part in one.parts:
            # What rests whole is gathered after the update, in its own dtype.
            leaves = [promise.leaf for promise in _promises_of(part, promised)]
            known = [x.path for x in leaves if x.rest.dim is not None and _is_matrix(x)]
            if part.dtype in WIDE and known:
                yield (
                    f"all-gather {one.name} moves {known[0]} in {part.dtype}, twice the bytes of "
                    "the 16 bits that matmuls use. Cast the parameter before it is used, or pass "
                    "precision=Precision(compute='bfloat16')."
                )


def _kept(report: Measured) -> Iterator[str]:
    for path, array in report.kept:
        yield (
            f"the gathered weights of {path} are kept for backward, all layers of them ({array}). "
            "Leave regather=True, and let no jax.checkpoint policy save values computed from "
            "weights alone."
        )


def _placement(report: Measured) -> Iterator[str]:
    for path, how in report.placement:
        yield (
            f"{path} reaches the step as {how}, not as the plan shards it. Place the state "
            "(zerojax.shard_train_state or plan.place), and keep it so with plan.constrain; with "
            "nnx, zerojax.nnx.shard(model, optimizer) after each step of another kind."
        )


def _donation(report: Measured) -> Iterator[str]:
    if report.not_donated:
        first = ", ".join(report.not_donated[:3])
        more = len(report.not_donated) - 3
        yield (
            f"{len(report.not_donated)} leaves of the state are not donated ({first}"
            f"{f' and {more} more' if more > 0 else ''}): they take memory twice. Leave "
            "donate=True, or jit your own step with donate_argnums=0 and return the state in the "
            "dtypes and shardings it came in (plan.constrain)."
        )


def _warnings(report: Measured) -> Iterator[str]:
    for text in report.warnings:
        yield (
            f"XLA gathers a full array to change its sharding: {text.strip()[:300]} Give it "
            "the sharding it is used in, with a with_sharding_constraint where it is made."
        )


# -- reading a report


def _of_kinds(report: Measured, *kinds: str) -> Iterator[Traffic]:
    return (one for one in report.traffic if one.kind in kinds)


def _is_ours(one: Traffic, plan: Plan | None) -> bool:
    """Whether a collective spans ZeRO's axes; those over other axes are the user's own."""
    if OPTIMIZER_SCOPE in one.scope.split("/"):
        return False
    return plan is None or one.axes is None or bool(set(one.axes) & set(plan.batch_axes))


def _is_within(one: Traffic, axes: Axes) -> bool:
    """Whether a collective spans some of these axes, and no others."""
    return one.axes is not None and set(one.axes) <= set(axes)


def _is_known(one: Traffic, within: str = "") -> bool:
    """Whether a collective moves gradients as codes; or rows of a table, in this scope."""
    is_of_rows = _rows.ROWS_SCOPE in one.scope and within in one.scope
    return _messages.MESSAGES_SCOPE in one.scope or is_of_rows


def _promises_of(part: Part, promised: dict[str, Promise]) -> list[Promise]:
    return [promised[path] for path in part.paths if path in promised]


def _gradient_in(part: Part, promised: dict[str, Promise]) -> Promise | None:
    """Returns the promise of a sharded parameter whose full gradient `part` has.

    It has the size of the parameter or of one of its layers, or XLA:GPU joined the gradients of
    several parameters, and scalars, into one array.
    """
    known = _promises_of(part, promised)
    for promise in known:
        layers = promise.leaf.shape[0] if promise.leaf.stacked else 1
        # Arrays smaller than this may have one size by chance.
        sizes = {promise.size, promise.logical_size}
        if part.elements > SMALL / 16 and part.elements in sizes | {n // layers for n in sizes}:
            return promise
    if part.elements < sum(promise.logical_size for promise in known):
        return None
    return max(known, key=lambda promise: promise.size, default=None)


def _most_reduced(part: Part, plan: Plan | None) -> float:
    """Returns the most bytes of an array in an all-reduce that is no gradient of a sharded leaf.

    It has a leaf that no stage shards, several of them that XLA joined, or statistics.
    """
    if plan is None:
        return BIG_ALL_REDUCE
    replicated = [leaf for leaf in plan.leaves if leaf.dim is None]
    joined = SMALL + sum(leaf.nbytes for leaf in replicated if leaf.path in part.paths)
    named = (leaf for leaf in plan.params if leaf.path in part.paths)
    joined += sum(_summed_over_replicas(leaf, plan) for leaf in named)
    statistics = 2 * sum(leaf.nbytes for leaf in plan.leaves if leaf.kind == OTHER)
    return max([joined, statistics, *(x.nbytes for x in replicated if x.kind != OPT_STATE)])


def _summed_over_replicas(leaf: LeafPlan, plan: Plan) -> float:
    """Returns the bytes of the gradient's shard, where further devices update the same one."""
    shards = _mesh.axes_size(plan.mesh, leaf.update.axes)
    is_replicated = 1 < shards < plan.size
    return _sent(leaf) * max(4, leaf.dtype.itemsize) / shards if is_replicated else 0


def _sent(leaf: LeafPlan) -> int:
    """Returns the elements of a leaf in a collective over those that update it: padded."""
    return math.prod(leaf.update.padded(leaf.shape))


def _computes_narrow(report: Measured) -> bool:
    flops = report.replay.flops_by_dtype
    narrow = sum(count for dtype, count in flops.items() if dtype in NARROW)
    return narrow > 0.9 * sum(flops.values())


def _is_matrix(leaf: LeafPlan) -> bool:
    return len(leaf.shape) - leaf.stacked >= 2
