"""Every reading of JAX that differs between versions, and nothing else.

That includes its error messages, the names of its classes and what its devices say of themselves.
Supported: JAX 0.10 (Python 3.11) to 0.12. `tests/units/test_compat.py` fails with a plain
message on a JAX whose internals have moved again.
"""

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
from jax import Array
from jax.core import AbstractValue, Tracer
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import backend, core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import batching, partial_eval
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax._types import Device, PyTree

REMAT = frozenset({"remat", "remat2", "checkpoint"})
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
INNER = ("jaxpr", "call_jaxpr", "body_jaxpr")
# Parameters of calls with derivatives by users, which JAX traces when it differentiates.
THUNKS = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk"})
DERIVATIVES = THUNKS | {"bwd", "out_trees"}

# -- jaxprs


class HasEffects(Protocol):
    """An equation, a jaxpr, or what stands for them."""

    @property
    def effects(self) -> Collection[object]: ...


def inner_jaxpr(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """Returns the jaxpr that a call, remat or loop runs, and its constants.

    0.10 has closed and open jaxprs; from 0.12 on there is one kind that carries its constants.
    """
    return opened(next(eqn.params[name] for name in INNER if name in eqn.params))


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns every open jaxpr among an equation's parameters: bodies, branches, calls."""
    return [jaxpr for jaxpr, _ in closed_jaxprs(eqn)]


def closed_jaxprs(eqn: JaxprEqn) -> list[tuple[Jaxpr, Sequence[ArrayLike]]]:
    """Returns what `inner_jaxprs` does, each with its constants."""
    values = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    pairs = map(opened, itertools.chain(*values))
    return [(jaxpr, consts) for jaxpr, consts in pairs if hasattr(jaxpr, "eqns")]


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """Returns an open jaxpr and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def every_eqn(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_eqn(inner)


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """Returns how many of a scan's operands are loop constants and how many are carried."""
    if "num_consts" in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry, _ = scan.params["ft_in"].unpack()
    return len(consts), len(carry)


def has_side_effects(step: HasEffects) -> bool:
    """Whether an equation does more than compute its outputs, such as printing.

    JAX counts it as an effect that a collective names a mesh axis; here that is none.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in step.effects)


def names_an_axis(step: HasEffects) -> bool:
    """Whether code, at any depth, speaks to other devices or asks which one it is on."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in step.effects)


def fresh(var: Var | Literal, aval: AbstractValue | None = None) -> Var:
    """Returns a new variable of the same type, or of the type `aval`."""
    return Var(var.aval if aval is None else aval)


def renamed(eqn: JaxprEqn, rename: Callable[[Var], Any], caller: JaxprEqn) -> JaxprEqn:
    """Returns `eqn` of an inlined call, renamed, and in the name scope of the caller."""
    scope = caller.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(
        invars=[v if isinstance(v, Literal) else rename(v) for v in eqn.invars],
        outvars=[rename(v) for v in eqn.outvars],
        source_info=eqn.source_info.replace(name_stack=scope),
    )


def without_outer_scope(jaxpr: Jaxpr) -> tuple[str, Jaxpr]:
    """Returns the name scope that all equations of a jaxpr are in, and the jaxpr without it."""
    stacks = [eqn.source_info.name_stack for eqn in jaxpr.eqns]
    levels = zip(*(stack.stack for stack in stacks), strict=False)
    depth = len(list(itertools.takewhile(lambda names: len({*names}) == 1, levels)))
    if not depth:
        return "", jaxpr
    eqns = [
        eqn.replace(source_info=eqn.source_info.replace(name_stack=stack[depth:]))
        for eqn, stack in zip(jaxpr.eqns, stacks, strict=True)
    ]
    return str(stacks[0][:depth]), jaxpr.replace(eqns=eqns)


def in_common_scope(eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """Returns the first equation, in a scope with the names of the first and the last."""
    info = eqns[0].source_info
    stacks = [info.name_stack.stack, eqns[-1].source_info.name_stack.stack]
    if stacks[0] == stacks[1] or len({*map(len, stacks)}) > 1:
        return eqns[0]
    levels = zip(*stacks, strict=True)
    scopes = [a if a == b else a._replace(name=f"{a.name}..{b.name}") for a, b in levels]
    stack = type(info.name_stack)(tuple(scopes))
    return eqns[0].replace(source_info=info.replace(name_stack=stack))


def scope_of(eqn: JaxprEqn) -> str:
    """Returns the name scope that an equation is in."""
    return str(eqn.source_info.name_stack)


def lines_of(eqn: JaxprEqn) -> Iterator[str]:
    """Yields 'file.py:12' for each call that made an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    yield from (f"{at.file_name}:{at.line_num}" for at in (traceback.frames if traceback else ()))


def make_jaxpr(
    eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Var | Literal]
) -> Jaxpr:
    """Returns an open jaxpr of these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = ("",) * len(invars), ("",) * len(outvars)
    info = jex_core.DebugInfo("zerojax", "loss", *names)
    return Jaxpr((), list(invars), list(outvars), list(eqns), effects, info)


def without_unread(jaxpr: Jaxpr) -> Jaxpr:
    """Returns `jaxpr` without what none of its outputs needs, at any depth. The inputs stay.

    0.10 removes a `jax.checkpoint` that prints: where something has side effects, all stays.
    """
    if has_side_effects(jaxpr):
        return jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


OpenJaxpr = tuple[Jaxpr, Sequence[ArrayLike]]  # an open jaxpr, and its constants


def jvp_rule(eqn: JaxprEqn) -> tuple[OpenJaxpr, list[bool]]:
    """Returns the jaxpr of results and then their tangents, and which results have one."""
    jaxpr, consts, zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*_no_zeros(eqn))
    return (jaxpr, consts), [not zero for zero in zeros]


def vjp_rules(eqn: JaxprEqn) -> tuple[OpenJaxpr, list[int | None], OpenJaxpr, list[bool]]:
    """Returns the jaxpr of forward, whose results follow what backward needs; for each of that,
    which operand it is, if any; the jaxpr of backward; and whether each operand has a gradient."""
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*_no_zeros(eqn))
    _, residuals, places = eqn.params["out_trees"]()
    kept = residuals.num_leaves - sum(place is not None for place in places)
    new = iter(jaxpr.outvars[:kept])
    needed = [next(new) if at is None else eqn.invars[at] for at in places]
    avals = [v.aval for v in needed] + [v.aval.to_tangent_aval() for v in jaxpr.outvars[kept:]]
    # Of shapes, say, backward needs the numbers.
    known = {k: np.asarray(v.val).item() for k, v in enumerate(needed) if isinstance(v, Literal)}

    def backward_of(*inputs: ArrayLike) -> PyTree:
        return eqn.params["bwd"].call_wrapped(*[known.get(k, x) for k, x in enumerate(inputs)])

    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    backward, grads = jax.make_jaxpr(backward_of, return_shape=True)(*inputs)
    grads = grads[0] if isinstance(grads, tuple) else grads  # with logs, from 0.12 on
    have = [bool(jax.tree.leaves(grad)) for grad in grads]
    return (jaxpr, consts), list(places), opened(backward), have


def _no_zeros(eqn: JaxprEqn) -> list[bool]:
    return [False] * (len(eqn.invars) - eqn.params.get("num_consts", 0))


def run_jaxpr(jaxpr: Jaxpr, args: Sequence[ArrayLike]) -> list[Array]:
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, ()))(*args)


def bind(eqn: JaxprEqn, values: Sequence[ArrayLike]) -> list[Array]:
    """Runs one equation on `values`. JAX's evaluator keeps its name scope, line and context."""
    # A variable that an equation reads twice may have two values, where they are parts.
    invars = [v if isinstance(v, Literal) else fresh(v) for v in eqn.invars]
    inputs = {v: x for v, x in zip(invars, values, strict=True) if not isinstance(v, Literal)}
    eqn = eqn.replace(invars=invars)
    return run_jaxpr(make_jaxpr([eqn], list(inputs), eqn.outvars), list(inputs.values()))


class Thunk:
    """A function with which JAX traces a user's own derivative, its result changed by `change`."""

    def __init__(self, thunk: Any, change: Callable[[Callable[[], PyTree]], PyTree]) -> None:
        self.thunk, self.change, self.debug_info = thunk, change, thunk.debug_info

    def call_wrapped(self, *zeros: bool) -> PyTree:
        return self.change(lambda: self.thunk.call_wrapped(*zeros))


# -- meshes and devices


def constrained(value: Array, sharding: NamedSharding) -> Array:
    """Returns `value` constrained to a sharding that does not divide it, inside `jax.jit`.

    Where JAX runs a program one operation at a time (`jax_debug_nans`), it stays where it is.
    Where such a value is the result of a jitted function, XLA chooses a sharding that divides it.
    JAX 0.12 fails to name that one ("IndivisibleError") unless an operation follows the constraint.
    Another constraint, which leaves every dimension open, is such a one, and does nothing.
    """
    if not isinstance(value, Tracer):
        return value
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim)
    value = jax.lax.with_sharding_constraint(value, sharding)
    return jax.lax.with_sharding_constraint(value, NamedSharding(sharding.mesh, free))


def bound_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which the running code is per-device code; () outside `shard_map`.

    That is not what the mesh calls manual: see `_loss/trace.py`.
    """
    return tuple(filter(_is_bound, jax.sharding.get_abstract_mesh().axis_names))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def context_on(eqn: JaxprEqn, change: Callable[[AbstractMesh], AbstractMesh]) -> Any:
    """Returns the context of an equation, which is set again where it runs, on another mesh."""
    mesh = change(eqn.ctx.cur_abstract_mesh)
    set_to = jax.sharding.use_abstract_mesh
    # First an empty mesh, because JAX refuses to replace a mesh by one with axes of other sizes.
    with eqn.ctx.manager, set_to(AbstractMesh((), ())), set_to(mesh):
        return type(eqn.ctx)()


def compiled_anew(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without JAX's cache, which jaxlib 0.10 to 0.12 need on CPUs: a program that was
    loaded and is written again lacks its functions ("Function wrapped_add not found")."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        return lowered.compile()
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def is_gpu(device: Device) -> bool:
    """Whether a device is a GPU; JAX calls those of `zerojax.aot`, say, "cuda"."""
    return device.platform in ("gpu", "cuda", "rocm")


def is_tpu(device: Device) -> bool:
    """Whether a device is a TPU, be it one of `zerojax.aot`."""
    return device.platform == "tpu"


def overlaps(device: Device) -> bool:
    """Whether XLA runs all-gathers beside compute: on GPUs and, of TPUs, on a v5e only."""
    return is_gpu(device) or (is_tpu(device) and "v5 lite" in device.device_kind)


def is_nvidia_gpu(device: Device) -> bool:
    """Whether a device is a GPU, and by its name not one of AMD's."""
    return is_gpu(device) and device.platform != "rocm"


def is_compile_only(device: Device) -> bool:
    """Whether code can be compiled for a device and not run: see `zerojax.aot`."""
    return type(getattr(device, "client", None)).__name__.startswith("CompileOnly")


def distributed_options() -> frozenset[str]:
    """Returns the options of `jax.distributed.initialize`; those of mTLS came after 0.10."""
    return frozenset(inspect.signature(jax.distributed.initialize).parameters)


def run_of_processes() -> Any:
    """Returns what JAX knows of the run that this process has joined: `process_id`,
    `num_processes`, `coordinator_address`, `client` and, in process 0, `service`.

    It needs no device. There is no public way to it: Orbax and XLA's own collectives find each
    other by its client too.
    """
    return multihost_utils.distributed.global_state  # type: ignore


def is_of_runtime(error: BaseException) -> bool:
    """Whether XLA raised an error; as a ValueError when JAX calls a compiled step directly."""
    is_value = isinstance(error, ValueError) and str(error).partition(":")[0].isupper()
    return is_value or isinstance(error, jax.errors.JaxRuntimeError)


def shared_store() -> Any:
    """Returns the key-value store that the processes of a run have in common; None without one.

    The processes' versions need not be the same.
    """
    return run_of_processes().client


# -- caches

P = ParamSpec("P")
R = TypeVar("R")
# Caches that outlive a run, since `clear_backends` does not clear them, and what they hold.
OF_A_RUN = (
    ("jax.api_util", "donation_vector"),  # trees, whose nodes may be a plan
    ("jax.experimental.multihost_utils", "_local_to_global_aval"),  # meshes
    ("jax.experimental.multihost_utils", "_global_to_local_aval"),
    ("orbax.checkpoint._src.serialization.replica_slices", "_sharding_num_replicas"),  # shardings
    ("orbax.checkpoint._src.futures.signaling_client", "get_signaling_client"),  # a run's client
)


def device_cache(function: Callable[P, R]) -> Callable[P, R]:
    """Caches a function whose arguments or results hold devices.

    JAX's `clear_backends` clears it, so that nothing of one backend outlives it.
    """
    cached = functools.cache(function)
    backend.register_backend_cache(cached, function.__qualname__)
    return cached  # type: ignore


def caches_of_a_run() -> list[Any]:
    """Returns the caches of JAX and Orbax that hold devices, or the client, of a run that ends."""
    return [getattr(sys.modules[name], cache) for name, cache in OF_A_RUN if name in sys.modules]


# -- cuDNN's attention

ATTENTION = "dot_product_attention_fwd"  # how its primitives' names begin
CUDNN = 91000  # any version that JAX takes; a traced program names one


def assume_cudnn() -> None:
    """Lets cuDNN's attention be traced where there is no cuDNN: XLA compiles it without one.

    It puts another check into JAX's module. JAX asks cuDNN for its version wherever the attention
    is traced, with no way to say that GPUs elsewhere have it, and a forecast without GPUs would
    have no cuDNN attention otherwise.
    """
    attend = inspect.unwrap(jax.nn.dot_product_attention).__globals__["cudnn_dot_product_attention"]
    module = inspect.unwrap(attend).__globals__
    try:
        module["check_cudnn_version"]()
    except RuntimeError:
        module["check_cudnn_version"] = lambda: CUDNN


# -- memories

# Whether barriers keep kernels apart. XLA:CPU of JAX 0.10 drops them before it fuses.
KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(value: Any) -> bool:
    """Whether an array, inside `jax.jit` or outside, is in host memory of a device."""
    return isinstance(value, jax.Array) and jax.typeof(value).memory_space == HOST


def uses_host(jaxpr: Jaxpr) -> bool:
    """Whether a program has anything in host memory."""
    variables = (var for eqn in every_eqn(jaxpr) for var in (*eqn.invars, *eqn.outvars))
    return any(getattr(var.aval, "memory_space", None) == HOST for var in variables)


def fetched(value: Array) -> Array:
    """Returns a value in the memory of its devices.

    A sharding constraint that names another memory moves nothing and says nothing.
    """
    if not is_on_host(value):
        return value
    device = getattr(jax.typeof(value).sharding.mesh, "abstract_device", None)
    if isinstance(value, Tracer) and getattr(device, "platform", "") == "tpu":
        # XLA:TPU drops a copy that directly follows an optimization barrier, as in the backward
        # pass of `jax.checkpoint`, and then refuses the program (E1200). Of a reshape it keeps it.
        return jax.device_put(value[None], DEVICE)[0]
    return jax.device_put(value, DEVICE)


def stored(value: Array) -> Array:
    """Returns a value in host memory."""
    return value if is_on_host(value) else jax.device_put(value, HOST)


# Whether a jitted function raises for a deleted array. Before, XLA crashes on several devices.
REFUSES_DELETED = jax.__version_info__ >= (0, 12)


# How `jax.vmap` runs primitives whose rules see all that is mapped.
VMAP_RULES = batching.fancy_primitive_batchers


def is_mapped(value: object) -> bool:
    """Whether `jax.vmap` shows its function one example in place of this array."""
    return type(value).__name__ == "BatchTracer"


# -- error messages: what JAX, XLA, Orbax and Python say where

OTHER_DEVICES = "incompatible devices"  # arrays are on other devices than the program
# A compiled program is called with other types, another structure or other shardings.
NOT_COMPILED_FOR = "[Cc]omputation was compiled|pytree it was called|device_put device"
OTHER_MESH = "should match the mesh passed to shard_map"  # another one is set
OTHER_AXIS_TYPES = "mesh should be the same across the entire program"  # for a callback
ORDERED = "ordered effects are not supported"
OF_MESHES = r"\bmesh\b"
OF_SHARDINGS = rf"{OF_MESHES}|sharding|PartitionSpec"
UNBOUND_AXIS = r"unbound axis name: (\w+)"
UNKNOWN_AXIS = r"Resource axis: (\S+) of (.*) is not found in mesh"
NOT_EXPLICIT = r"contain axis names that are of type Auto or Manual(?:.*name: (\S+) of type)?"
CLOSED_OVER = "Closing over inputs to shard_map.*Explicit"
OTHER_DTYPES = r"must have equal (output )?types.*\bfloat(32|64)\b"  # of a loop or a branch
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
TIMEOUT = "DEADLINE_EXCEEDED"
NO_CLUSTER = "coordinator_address"  # nothing around tells JAX of the other processes
NO_SUCH_OPTION = "No such compile option"
STILL_READ = "external reference"  # donated memory that numpy reads
SPEC_OF_FILE = " [tensorstore_spec"  # then pages of it
NO_KEY = "invalid PRNG key data.*got ndim=0"  # a number
NO_NAMES = "__contains__"  # an array is asked for names
NAMED_TWICE = r"multiple values for keyword argument '(\w+)'"
MISSING = r"missing \d+ required {} arguments?: (.+)"


def said(error: BaseException, words: str) -> re.Match[str] | None:
    """Finds some of these words in an error's message."""
    return re.search(words, str(error), re.DOTALL)


# -- XLA's log

REMATERIALIZED = "Involuntary full rematerialization"
LOG_MESSAGE = re.compile(r"^(?=[IWEF]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log)", re.MULTILINE)
# Information, and what XLA logs of its own work: `audit` and `forecast` say what came of it.
HARMLESS = re.compile(
    r"I\d{4} |.* I .*\.cc|WARNING: All log messages before absl::InitializeLog"
    r"|.*(slow_operation_alarm|hlo_rematerialization|gpu_hlo_schedule)\.cc|.*Registers are spilled"
)


def rematerializations(log: Sequence[str]) -> list[str]:
    """Returns XLA's warnings that it replicates an array to change its sharding, each once."""
    said = (line[line.find(REMATERIALIZED) :] for line in log if REMATERIALIZED in line)
    return list(dict.fromkeys(said))


def without_harmless(log: str) -> str:
    """Returns XLA's log without its harmless messages, each of which may have several lines."""
    return "".join(part for part in LOG_MESSAGE.split(log) if not HARMLESS.match(part))


def is_ready(leaf: object) -> bool:
    """Whether an array's value is there. JAX's arrays can say so, but `jax.Array` does not."""
    return leaf.is_ready() if isinstance(leaf, jax.Array) else True  # type: ignore
