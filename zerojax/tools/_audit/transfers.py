"""What the contract says of host memory: state there travels once in each direction, parameters for
each use, what waits for backward once both ways, all of it by the copy engines."""

from collections.abc import Iterator

from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._table import human_bytes
from zerojax.tools._audit.measured import Measured
from zerojax.tools._hlo.transfers import IN_HOST, TO_DEVICE, TO_HOST, Transfer

SMALL = 2**20  # bytes of a copy that may be anything
MOST = 1.01  # times the plan's bytes, of those that are copied


def findings(report: Measured) -> Iterator[str]:
    """Yields what breaks the contract of a program for GPUs. For CPUs all memory is one."""
    if report.plan is None or report.backend != "gpu":
        return
    there = report.plan.host_bytes_per_device()
    planned, moments, params = sum(there.values()), there[OPT_STATE], there[PARAMS]
    if abs(report.memory.on_host - planned) > SMALL:
        yield (
            f"{human_bytes(report.memory.on_host)} of the state are in host memory and the plan "
            f"has {human_bytes(planned)} there. Lower the step with plan.abstract(), or place the "
            "state by this plan."
        )
    # Forward and backward of each microbatch fetch parameters, and so does the update.
    fetched = 2 * report.accumulate * params
    # What a microbatch keeps there for its backward is sent and fetched once.
    kept = report.memory.host_kept
    most = {
        TO_DEVICE: planned + fetched + report.accumulate * kept,
        TO_HOST: planned + report.accumulate * kept,
    }
    also = f", and what is kept there for backward, {human_bytes(kept)}" if kept else ""
    for way in (TO_DEVICE, TO_HOST) if report.trains else ():
        copied = report.host_bytes(way)
        if copied > most[way] * MOST + SMALL:
            yield (
                f"{human_bytes(copied)} are copied {way} in a step; what the plan has in host "
                f"memory, {human_bytes(planned)}{also}, needs {human_bytes(most[way])}. Look for "
                "state that the step reads outside of the optimizer."
            )
        elif copied <= SMALL < moments:
            yield (
                f"Hardly anything is copied {way} in a step, and the plan has "
                f"{human_bytes(moments)} of optimizer state in host memory, which is not updated "
                "then. Compare the step with one device by zerojax.verify."
            )
    if report.memory.host_temporary > SMALL and not kept:
        yield (
            f"{human_bytes(report.memory.host_temporary)} of host memory are temporary: XLA copies "
            "state there instead of updating it in place. Donate the state, donate=True."
        )
    yield from (_told(one) for one in report.replay.transfers if _is_slow(one, report.accumulate))


def _is_slow(one: Transfer, microbatches: int) -> bool:
    # Where a microbatch begins and ends, outside of loops over layers, nothing else is computed.
    beside = one.by_engine and one.asynchronous
    in_layers = one.trips > microbatches
    return one.nbytes > SMALL and (one.way == IN_HOST or (in_layers and not beside))


def _told(one: Transfer) -> str:
    what = f"{one.instruction.name}, {human_bytes(one.total_bytes)} a step"
    if one.way == IN_HOST:
        return (
            f"{what}, is a copy from host memory to host memory. Look for a loop that reads and "
            "writes one stack in host memory in the same turn."
        )
    if one.by_engine:
        return (
            f"{what} {one.way}, is a copy that the GPU waits for: nothing computes beside it. Look "
            "for a loop that needs at once what it fetches, or sends what it has just computed."
        )
    return (
        f"{what} {one.way}, is made by a kernel, which occupies the GPU, and not by its copy "
        "engines. XLA could not tell where the slice is: index stacks in host memory by the "
        "loop's own counter."
    )
