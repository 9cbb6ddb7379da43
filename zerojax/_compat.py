"""Every reading of JAX that differs between versions, and nothing else.

Supported: JAX 0.10 (Python 3.11) to 0.12. `tests/test_compat.py` fails with a plain
message on a JAX whose internals have moved again.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh

from zerojax._types import Device

REMAT = frozenset({"remat", "remat2", "checkpoint"})
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
# Parameters of calls with derivatives by users, which JAX traces when it differentiates.
THUNKS = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk"})
# Bytes. 0.12's scheduler for GPUs takes larger ones for shorter than they are, and starts them
# late: of a layer of 6 GiB, in one or in two, 830 or 474 ms were waited for. 0.10 knows better.
LARGEST_COLLECTIVE = 2**32 - 1 if jax.__version_info__ >= (0, 12) else 2**62


def inner_jaxpr(eqn: jex_core.JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that a call, remat or scan equation runs, and its constants.

    0.10 has closed and open jaxprs; from 0.12 on there is one kind that carries its constants.
    """
    inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are loop constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def has_side_effects(step: Any) -> bool:
    """Whether an equation does more than its outputs say (prints, say). Naming a mesh axis, as
    every collective does, is an effect in JAX's books but not one of these."""
    effects = getattr(step, "effects", ())
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)


def names_an_axis(jaxpr: Any) -> bool:
    """Whether a jaxpr, at any depth, speaks to other devices or asks which one it is on."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)


def bind(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Runs one equation on `values`, keeping its name scope, source line and context.

    JAX's own evaluator does that bookkeeping; giving it a jaxpr of one equation needs no
    private module.
    """
    pairs = zip(eqn.invars, values, strict=True)
    inputs = {v: x for v, x in pairs if not isinstance(v, jex_core.Literal)}
    jaxpr = make_jaxpr([eqn], list(inputs), eqn.outvars)
    return run_jaxpr(jaxpr, list(inputs.values()))


def make_jaxpr(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An open jaxpr of these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = ("",) * len(invars), ("",) * len(outvars)
    info = jex_core.DebugInfo("zerojax", "loss", *names)
    return jex_core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, info)


def without_unread(jaxpr: Any) -> Any:
    """`jaxpr` without what none of its outputs is made from, at any depth. The inputs stay.

    0.10 takes a `jax.checkpoint` out that prints: where there is such a thing, all stays.
    """
    if has_side_effects(jaxpr):
        return jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def run_jaxpr(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, ()))(*args)


def renamed(eqn: jex_core.JaxprEqn, rename: Any, caller: jex_core.JaxprEqn) -> jex_core.JaxprEqn:
    """`eqn` of an inlined call: variables renamed, name scope continued from the caller's."""
    scope = caller.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(
        invars=[v if isinstance(v, jex_core.Literal) else rename(v) for v in eqn.invars],
        outvars=[rename(v) for v in eqn.outvars],
        source_info=eqn.source_info.replace(name_stack=scope),
    )


def fresh(var: Any, aval: Any = None) -> Any:
    """A new variable of the same type, or of that of `aval`."""
    return jex_core.Var(var.aval if aval is None else aval)


def bound_axes() -> tuple[str, ...]:
    """The mesh axes over which the running code is per-device code; empty outside `shard_map`.

    Not what the mesh calls manual: see `_loss/constraints.py`.
    """
    return tuple(filter(_is_bound, jax.sharding.get_abstract_mesh().axis_names))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> list[Any]:
    """Every open jaxpr among an equation's parameters: bodies, branches, calls."""
    return [jaxpr for jaxpr, _ in closed_jaxprs(eqn)]


def closed_jaxprs(eqn: jex_core.JaxprEqn) -> list[tuple[Any, Sequence[Any]]]:
    """As `inner_jaxprs`, each with its constants."""
    values = [
        one
        for value in eqn.params.values()
        for one in (value if isinstance(value, tuple | list) else (value,))
    ]
    opened = [(getattr(value, "jaxpr", value), getattr(value, "consts", ())) for value in values]
    return [(jaxpr, consts) for jaxpr, consts in opened if hasattr(jaxpr, "eqns")]


def shared_store() -> Any:
    """The key-value store that the processes of a run have in common; None without one.

    It needs no device, and the processes' versions need not be the same. There is no public
    way to it: Orbax and XLA's own collectives find each other by it too.
    """
    return multihost_utils.distributed.global_state.client  # type: ignore


def every_eqn(jaxpr: Any) -> Iterator[jex_core.JaxprEqn]:
    """The equations of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_eqn(inner)


def is_gpu(device: jax.Device) -> bool:
    return device.platform in ("gpu", "cuda", "rocm")


def is_dropped(var: Any) -> bool:
    return isinstance(var, jex_core.DropVar)


def mesh_of(eqn: jex_core.JaxprEqn) -> AbstractMesh:
    """The mesh that was set where an equation was traced; it is set again where it runs."""
    return eqn.ctx.cur_abstract_mesh


def context_on(eqn: jex_core.JaxprEqn, mesh: AbstractMesh) -> Any:
    """The context of an equation with another mesh set."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return type(eqn.ctx)()


class Thunk:
    """What traces a user's own derivative when it is wanted, with something done to the result."""

    def __init__(self, thunk: Any, change: Callable[[Callable[[], Any]], Any]) -> None:
        self.thunk, self.change, self.debug_info = thunk, change, thunk.debug_info

    def call_wrapped(self, *zeros: bool) -> Any:
        return self.change(lambda: self.thunk.call_wrapped(*zeros))


def is_gpu(device: Device) -> bool:
    """Whether a device is a GPU; JAX calls those of `zerojax.aot`, say, "cuda"."""
    return device.platform in ("gpu", "cuda", "rocm")


REMATERIALIZED = "Involuntary full rematerialization"
LOG_MESSAGE = re.compile(r"^(?=[IWEF]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log)", re.MULTILINE)
# Information, and what XLA logs of its own work: `audit` and `forecast` say what came of it.
HARMLESS = re.compile(
    r"I\d{4} |.* I .*\.cc|WARNING: All log messages before absl::InitializeLog"
    r"|.*(slow_operation_alarm|hlo_rematerialization)\.cc|.*Registers are spilled"
)


def rematerializations(log: Sequence[str]) -> list[str]:
    """Returns XLA's warnings that it replicates an array to change its sharding, each once."""
    said = (line[line.find(REMATERIALIZED) :] for line in log if REMATERIALIZED in line)
    return list(dict.fromkeys(said))


def without_harmless(log: str) -> str:
    """Returns XLA's log without its harmless messages, each of which may have several lines."""
    return "".join(part for part in LOG_MESSAGE.split(log) if not HARMLESS.match(part))
