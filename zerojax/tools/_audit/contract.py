"""The contract of each stage's compiled program, and the rules that find where a program breaks it.

Each rule is a function. A finding is one line: the operation, the parameter, the likely cause, the
remedy.
"""

import collections
import math
import re
from collections.abc import Iterator

from zerojax._jaxprs import common_path
from zerojax._plan.plan import LeafPlan, Plan
from zerojax._specs import Axes, axes_size, beyond
from zerojax._state.state import OPT_STATE, OTHER, PARAMS
from zerojax._table import few, human_bytes, in_runs
from zerojax._wire import codecs as _codecs
from zerojax.tools._audit.measurement import OF_OPTIMIZER, Measurement, is_ours, is_written
from zerojax.tools._hlo import flow as _flow
from zerojax.tools._hlo.flow import ARITHMETIC
from zerojax.tools._hlo.module import Array
from zerojax.tools._hlo.timeline import IN_HOST, TO_DEVICE, TO_HOST, Sent

FEW_BYTES = 4096  # a step may always reduce these: losses, norms, statistics
BIG_ALL_REDUCE = 2**20  # the largest that is allowed without a plan
BIG_GATHER = 2**20  # from here on a gather in a loop should not be synchronous
WIDE_DTYPES = {"f32", "f64"}
NARROW_DTYPES = {"bf16", "f16"}
ANY_WAITING = 2**28  # bytes of gradients: XLA joins smaller ones, to reduce them at once
FEW_WAITING = 8  # arrays, such as embeddings and heads
ANY_COPY = 2**20  # smaller copies to or from the host are ignored
MOST_COPIED = 1.01  # times the plan's bytes
# Scopes of exchanges that are written. XLA names those that it adds after what needs them.
EXCHANGES = re.compile(r"/(ragged_)?all_to_all\b|/ppermute\b")

UNNAMED = (
    "no argument of the program is named after a parameter of the plan, so what its stage "
    "promises cannot be checked. Let the step take the state as one argument, with a name of its "
    "own: jax.jit(lambda state, batch: ...)."
)

HOST_TO_HOST = (
    "a copy from host memory to host memory. Look for a loop that reads and writes one stack in "
    "host memory in one iteration."
)
SLOW_COPIES = (  # of a kernel, and of the copy engines
    "made by a kernel, which occupies the GPU, and not by its copy engines. XLA could not tell "
    "where the slice is: index stacks in host memory by the loop's own counter.",
    "a copy that the GPU waits for: nothing computes beside it. Look for a loop that needs an "
    "array as soon as it fetches it, or sends one as soon as it computes it.",
)

Leaves = dict[str, LeafPlan]  # the sharded parameters, by path


def findings(report: Measurement) -> list[str]:
    """Returns what breaks the contract; without a plan, what no stage does."""
    if report.unread:  # nothing passes because it was not read
        return [report.unread, *_warnings(report)]
    general = [*_exchanges(report), *_warnings(report)]
    plan = report.plan
    if plan is None:
        return [*general, *_all_reduces(report, {})]
    # Parameters in host memory take no memory of the device, whatever their names.
    if not report.memory.parameters and any(not leaf.is_on_host for leaf in plan.params):
        return [UNNAMED, *general]
    leaves = {leaf.path: leaf for leaf in plan.params if leaf.update.dim is not None}
    return [
        *_state(report),
        *_all_reduces(report, leaves),
        *(_reduced(report, leaves) if report.trains else ()),
        *_synchronous(report),
        *_gathers(report, plan, leaves),
        *_dtypes(report, leaves),
        *_kept(report),
        *(_waiting(report, leaves, plan.stage) if plan.stage > 1 and report.trains else ()),
        *(_copies(report, plan) if report.backend == "gpu" else ()),
        *general,
    ]


# -- the rules


def _exchanges(report: Measurement) -> Iterator[str]:
    for one in _of_kinds(report, "all-to-all", "ragged-all-to-all", "collective-permute"):
        # XLA:TPU pads reduce-scatters to tiles, and moves what it has padded by permutes.
        is_padding = report.backend == "tpu" and one.kind == "collective-permute" and not one.scope
        known = is_padding or EXCHANGES.search(one.scope)
        if one.wire_bytes > FEW_BYTES and not known:
            yield (
                f"{one.kind} {one.name} moves {human_bytes(one.total_bytes)} ({one.serves}): no "
                "stage needs one, so activations or weights change their layout. Look for a "
                "with_sharding_constraint, or a batch that is not sharded along its first "
                "dimension."
            )


def _all_reduces(report: Measurement, leaves: Leaves) -> Iterator[str]:
    plan = report.plan
    whole: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for one, part in _arrays(report, "all-reduce"):
        leaf = _gradient_in(part, leaves)
        # Shards of gradients are summed over the devices that update the same one.
        if plan and leaf and not _is_within(one, beyond(plan.batch_axes, leaf.update.axes)):
            remedy = (
                f"({part}); stage {plan.stage} promises a reduce-scatter, half the bytes. Take "
                "gradients with zerojax.value_and_grad or zerojax.train_step, and use no psum or "
                "pmean of gradients of your own."
            )
            whole[one.name, remedy].append(leaf.path)
        elif plan and not leaves and part.paths:
            continue  # stage 0; XLA may join gradients
        elif not part.paths and (is_written(one, report.trains) or OF_OPTIMIZER.search(one.scope)):
            continue  # the loss's or the optimizer's, which XLA may join with ZeRO's
        elif part.nbytes > _most_reduced(part, plan):
            yield (
                f"all-reduce {one.name} sums {part}, {human_bytes(part.nbytes)} ({one.serves}): "
                "larger than any statistic a loss should reduce. Look for activations summed over "
                "the data axis, or weights sharded without a gather."
            )
    for (name, remedy), paths in whole.items():
        for path in in_runs(paths):
            yield f"all-reduce {name} sums the full gradient of {path} {remedy}"


def _reduced(report: Measurement, leaves: Leaves) -> Iterator[str]:
    trained = [path for path, leaf in leaves.items() if not leaf.frozen]
    sent = [one for one in report.traffic if not one.is_of_loss]
    reducing = [t for t in sent if t.kind in ARITHMETIC or _codecs.MESSAGES_SCOPE in t.scope]
    reaches = any(path in leaves for one in reducing for path in one.paths)
    # Where nothing is donated, no output is known by its argument: a small one may be a gradient.
    known = report.module.aliases or not reducing
    are_small = all(one.wire_bytes <= FEW_BYTES for one in reducing)
    if trained and not reaches and known and are_small:
        yield (
            f"no collective reduces the gradient of {trained[0]}, or of any other "
            "parameter: each device trains on its own part of the batch. Take gradients with "
            "zerojax.value_and_grad or zerojax.train_step."
        )


def _synchronous(report: Measurement) -> Iterator[str]:
    # The loop over microbatches has the first gather of each, and nothing runs before that.
    outer = int(report.accumulate > 1)
    for one in _of_kinds(report, "all-gather") if report.backend == "gpu" else ():
        if not one.asynchronous and len(one.loops) > outer and one.wire_bytes > BIG_GATHER:
            yield (
                f"all-gather {one.name} ({one.serves}) is synchronous inside a loop over layers: "
                "nothing hides its time. Use Schedule(prefetch=True) and the default compiler "
                "options. If both are set, XLA ran out of memory to overlap it."
            )


def _gathers(report: Measurement, plan: Plan, leaves: Leaves) -> Iterator[str]:
    """Finds parameters that are gathered too often.

    At stage 3 every microbatch gathers twice, for forward and for backward; each of the two loops
    may gather one layer more, at its end. Over the far axes, over which a step does not keep it
    sharded, a parameter is gathered once: on its way near, or after the update. The last layer of a
    loop that prefetches crosses them again.
    """
    found = [(one, part, _leaves_of(part, leaves)) for one, part in _arrays(report, "all-gather")]
    # A loop over stacks that the step itself has made gathers one of several parameters at a time.
    together: dict[str, list[LeafPlan]] = {}
    for _, _, several in found:
        for leaf in several:
            together[leaf.path] = max(several, together.get(leaf.path, []), key=len)
    times: dict[tuple[str, Axes], float] = collections.defaultdict(float)
    trips: dict[str, float] = collections.defaultdict(float)
    for one, part, several in found:
        if not several:
            continue
        leaf, gathered = several[0], part.size * (1 if one.stands_for else one.group)
        alike = together[leaf.path]
        far = beyond(leaf.update.axes, leaf.near.axes)
        far = far if _is_within(one, far) else ()
        near = axes_size(plan.mesh, leaf.near.axes) if far else 1
        first = alike[0].path
        times[first, far] += gathered * one.trips * near / sum(map(_sent, alike))
        turns = one.trips / report.accumulate if len(alike) > 1 else 1
        trips[first] = leaf.shape[0] if leaf.stacked else max(trips[first], turns)
        whole = leaf.stacked and leaf.rest.dim is not None and gathered >= _sent(leaf)
        if whole and report.module.read_by_layers & {_sent(leaf), math.prod(leaf.shape)}:
            yield (
                f"all-gather {one.name} gathers all {leaf.shape[0]} layers of {leaf.path} at "
                f"once ({part} per device), outside of the loop over them. Scan over the stack "
                "itself: do not reshape, index or cast all of it before the loop. If the first "
                "dimension counts something other than layers, name the stacks that there are: "
                "zerojax.plan(..., stacked='<their paths>')."
            )
    often: dict[str, list[str]] = collections.defaultdict(list)
    for (path, far), count in times.items():
        leaf = leaves[path]
        passes = 1 if far else 2 * report.accumulate if leaf.near.dim is not None else 0
        prefetches = trips[path] > 1 and (not far or leaf.near.axes)
        most = passes * (1 + 1 / trips[path] if prefetches else 1)
        over = f" over {' x '.join(far)}" if far and leaf.near.axes else ""
        if count > most + 0.01:
            finding = (
                f"gathered {count:.3g} times a step{over}; stage {plan.stage} promises at most "
                f"{most:.3g}. Look for uses in several jax.checkpoint regions, or a gather inside "
                "a loop that does not need it there."
            )
            often[finding].append(common_path([one.path for one in together[path]]))
    for finding, paths in often.items():
        yield from (f"{path} is {finding}" for path in in_runs(paths))


def _dtypes(report: Measurement, leaves: Leaves) -> Iterator[str]:
    """Finds gathers in 32 bits of weights used in 16; XLA:CPU widens whatever it moves."""
    flops = report.replay.flops_by_dtype
    narrow = sum(count for dtype, count in flops.items() if dtype in NARROW_DTYPES)
    if report.backend != "gpu" or narrow <= 0.9 * flops.total():
        return
    for one, part in _arrays(report, "all-gather"):
        # A parameter that rests whole is gathered after the update, in its own dtype.
        sharded = [leaf for leaf in _leaves_of(part, leaves) if leaf.rest.dim is not None]
        matrices = [leaf.path for leaf in sharded if len(leaf.shape) - leaf.stacked >= 2]
        if part.dtype in WIDE_DTYPES and matrices:
            yield (
                f"all-gather {one.name} moves {matrices[0]} in {part.dtype}, twice the bytes of "
                "the 16 bits that matmuls use. Cast the parameter before it is used, or pass "
                "precision=Precision(compute='bfloat16')."
            )


def _kept(report: Measurement) -> Iterator[str]:
    for path, array in report.kept:
        yield (
            f"the gathered weights of {path} are kept for backward, all layers of them ({array}). "
            "Leave Schedule(regather=True), and let no jax.checkpoint policy save values computed "
            "from weights only."
        )


def _waiting(report: Measurement, leaves: Leaves, stage: int) -> Iterator[str]:
    """Finds full gradients of most parameters that exist at once."""
    sent = {one.instruction: one for one in _of_kinds(report, "reduce-scatter")}
    gradients = {
        leaf.path: part
        for reader, at in _flow.waiting(report.module, sent)
        if (part := sent[reader].parts[at]) and (leaf := _gradient_in(part, leaves))
    }
    size = sum(part.size for part in gradients.values())
    nbytes = sum(part.nbytes for part in gradients.values())
    are_most = size > sum(map(_sent, leaves.values())) / 2
    if are_most and nbytes > ANY_WAITING and len(gradients) > FEW_WAITING:
        yield (
            f"the gradients of {len(gradients)} parameters ({common_path([*gradients])}), "
            f"{human_bytes(nbytes)} of each device, wait for each other, and are reduced after "
            f"the last one: stage {stage} promises one layer's at a time. Let layers run as a "
            "loop: a scan, or Schedule(roll=True)."
        )


def _state(report: Measurement) -> Iterator[str]:
    for path, how in report.placement:
        yield (
            f"{path} reaches the step as {how}, not as the plan shards it. Place the state "
            "(zerojax.shard_train_state or plan.place), and keep it so with plan.constrain; with "
            "nnx, zerojax.nnx.shard(model, optimizer) after each step of another kind."
        )
    if report.not_donated and report.trains:
        yield (
            f"{len(report.not_donated)} leaves of the state are not donated "
            f"({few(report.not_donated)}): they take memory twice. Leave donate=True, or jit "
            "your own step with donate_argnums=0 and return the state in the dtypes and shardings "
            "it came in (plan.constrain)."
        )


def _warnings(report: Measurement) -> Iterator[str]:
    for text in report.warnings:
        yield (
            f"XLA gathers a full array to change its sharding: {text.strip()[:300]} Where the "
            "array is made, give it the sharding in which it is used: with_sharding_constraint."
        )


def _copies(report: Measurement, plan: Plan) -> Iterator[str]:
    """Finds what breaks the contract of host memory, in a program for GPUs: CPUs have one memory.

    State there travels once in each direction, parameters for each use, what waits for backward
    once both ways, all of it by the copy engines.
    """
    there = plan.host_bytes_per_device()
    planned, moments, params = sum(there.values()), there[OPT_STATE], there[PARAMS]
    if abs(report.memory.on_host - planned) > ANY_COPY:
        yield (
            f"{human_bytes(report.memory.on_host)} of the state are in host memory and the plan "
            f"has {human_bytes(planned)} there. Lower the step with plan.abstract(), or place the "
            "state by this plan."
        )
    # Each microbatch sends what waits there for its backward, and fetches it, once.
    kept = report.memory.host_kept
    sent = planned + report.accumulate * kept
    # Forward and backward of each microbatch fetch parameters, and so does the update.
    most = {TO_DEVICE: sent + 2 * report.accumulate * params, TO_HOST: sent}
    also = f" and {human_bytes(kept)} that wait for backward" if kept else ""
    for way in most if report.trains else ():
        copied = report.host_bytes(way)
        if copied > most[way] * MOST_COPIED + ANY_COPY:
            yield (
                f"{human_bytes(copied)} are copied {way} in a step; the plan has "
                f"{human_bytes(planned)} in host memory{also}, which need "
                f"{human_bytes(most[way])}. Look for state that the step reads outside of the "
                "optimizer."
            )
        elif copied <= ANY_COPY < moments:
            yield (
                f"Hardly anything is copied {way} in a step, and the plan has "
                f"{human_bytes(moments)} of optimizer state in host memory, which is not updated "
                "then. Compare the step with one device: zerojax.verify(step, state, batch)."
            )
    if report.memory.host_temporary > ANY_COPY and not kept:
        yield (
            f"{human_bytes(report.memory.host_temporary)} of host memory are temporary: XLA copies "
            "state there instead of updating it in place. Donate the state, donate=True."
        )
    for one in report.replay.transfers:
        # Where a microbatch begins and ends, outside of loops over layers, nothing else computes.
        is_slow = one.trips > report.accumulate and not (one.by_engine and one.asynchronous)
        if one.wire_bytes > ANY_COPY and (one.kind == IN_HOST or is_slow):
            way = "" if one.kind == IN_HOST else f" {one.kind}"
            what = HOST_TO_HOST if one.kind == IN_HOST else SLOW_COPIES[one.by_engine]
            yield f"{one.name}, {human_bytes(one.total_bytes)} a step{way}, is {what}"


# -- reading a report


def _of_kinds(report: Measurement, *kinds: str) -> Iterator[Sent]:
    return (one for one in report.traffic if one.kind in kinds and is_ours(one, report.plan))


def _arrays(report: Measurement, kind: str) -> Iterator[tuple[Sent, Array]]:
    """Yields the arrays that ZeRO's collectives of a kind take, and the all-reduces that stand for
    some of that kind."""
    for one in (one for one in report.traffic if is_ours(one, report.plan)):
        kinds = one.stands_for or (one.kind,) * len(one.parts)
        yield from ((one, part) for part, its in zip(one.parts, kinds, strict=True) if its == kind)


def _is_within(one: Sent, axes: Axes) -> bool:
    """Whether a collective spans some of these axes, and no others."""
    return one.axes is not None and set(one.axes) <= set(axes)


def _leaves_of(part: Array, leaves: Leaves) -> list[LeafPlan]:
    return [leaves[path] for path in part.paths if path in leaves]


def _gradient_in(part: Array, leaves: Leaves) -> LeafPlan | None:
    """Returns the sharded parameter whose full gradient `part` has.

    It has the size of the parameter, with its padding or without, or of one of its layers; or
    XLA:GPU joined the gradients of several parameters, and scalars, into one array.
    """
    named = _leaves_of(part, leaves)
    for leaf in named:
        layers = leaf.shape[0] if leaf.stacked else 1
        sizes = {_sent(leaf), math.prod(leaf.shape)}
        # Arrays smaller than this may have one size by chance.
        if part.size > FEW_BYTES / 16 and part.size in sizes | {n // layers for n in sizes}:
            return leaf
    is_joined = part.size >= sum(math.prod(leaf.shape) for leaf in named)
    return max(named, key=_sent, default=None) if is_joined else None


def _most_reduced(part: Array, plan: Plan | None) -> float:
    """Returns the most bytes of an array in an all-reduce that is no gradient of a sharded leaf.

    It has a leaf that no stage shards, several of them that XLA joined, or statistics.
    """
    if plan is None:
        return BIG_ALL_REDUCE
    replicated = [leaf for leaf in plan.leaves if leaf.dim is None]
    joined = FEW_BYTES + sum(leaf.nbytes for leaf in replicated if leaf.path in part.paths)
    for leaf in plan.params:
        shards = axes_size(plan.mesh, leaf.update.axes)
        # Further devices update the same shard: its gradient is summed over them.
        if leaf.path in part.paths and 1 < shards < plan.size:
            joined += _sent(leaf) * max(4, leaf.dtype.itemsize) / shards
    statistics = 2 * sum(leaf.nbytes for leaf in plan.leaves if leaf.kind == OTHER)
    return max([joined, statistics, *(x.nbytes for x in replicated if x.kind != OPT_STATE)])


def _sent(leaf: LeafPlan) -> int:
    """Returns the elements of a leaf in a collective over those that update it: padded."""
    return math.prod(leaf.update.padded(leaf.shape))
