"""Updates inside backward: which parameters a step updates there, and with what.

Gains, modelled for 7.5B on 8 H100s (JAX 0.12): a peak of 14.7 GiB for 18.0, and 535 ms for 525;
with the optimizer state in host memory 7.8 GiB for 11.2, and 553 ms for 686 at 50 GB/s, though 1369
for 1143 at 12.5. Costs 280 lines of code with `updating.py`, and 300 in `_update/`, which host
memory needs as well.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Var
from jax.sharding import NamedSharding
from jax.tree_util import register_dataclass

from zerojax import _compat
from zerojax._features import host_state as _host_state
from zerojax._jaxprs import Atom, is_var
from zerojax._kernel.arrays import Layer, sliced, written
from zerojax._kernel.places import LeafPlan, by_layer
from zerojax._kernel.travel import Held
from zerojax._plan.encodings import as_float, as_stored
from zerojax._plan.plan import Plan
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._types import PyTree, wide
from zerojax._update import rules as _rules
from zerojax._update.rules import SAME, Flat, Label
from zerojax._update.update import OTHER_PROGRAM, TOGETHER, InParts, Part, Update, on_no_mesh

GLOBAL = "the update reads something of all gradients, which is known after backward"
NO_STACK = "the plan does not take it for a stack of layers"

# [Note: updates inside backward]
# A layer's gradient is whole as soon as the loop over layers has left that layer. If the optimizer
# needs nothing else, backward updates the layer there, and no tree of gradients is ever in memory
# (LOMO's idea, for every optimizer of which this is proved). State in host memory then travels
# beside backward's compute, and where weights rest whole (stages 1 and 2) so does their all-gather.
#
# The loop is a `jax.custom_vjp`, and gradients are the only results of its backward. So the
# parameter and its optimizer state go in as stacks (`Held.state`), and the gradients that come out
# for these stacks are the stacks after the update.
#
# State comes from host memory with one gradient and goes back after the others, so that a step
# takes forward + max(backward, 2 * c), where c is how long the state travels one way. After
# backward both ways go at once: forward + backward + c, and all gradients are in memory. JAX 0.12,
# 7.5B on 8 H100s, modelled, c = 150, 300 and 600 ms: 553, 778 and 1369 ms in a backward of 400, and
# 686, 837 and 1143 after it. No plan knows how fast its links are, so "auto" saves memory;
# `zerojax.forecast` tells which is faster.

Apply: TypeAlias = Callable[[Array, Sequence[Array], Sequence[Array]], list[Array]]


class NoGradientError(Exception):
    """Backward never comes to the loops of these parameters: no gradient leads through them."""


class _UnprovedError(Exception):
    """Why no rule proves that backward may update a parameter."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdate:
    """The update of a device's part of one layer.

    `stacks` are the positions in the state of the stacks that it updates, the parameter first;
    `given` those of the leaves that it only reads. `apply(grad, layers, given)` returns the new
    layers, and `added` takes the same and returns the layer's part in the `sums` at which the
    update divides.
    """

    stacks: tuple[int, ...]
    given: tuple[int, ...]
    apply: Apply
    added: Apply
    sums: tuple[int, ...]


class InBackward:
    """The `updates` of a state that backward may do, by the paths of parameters; `why` says why
    not, for the others. With `must`, backward must update one of them at least.

    Positions are those of an update's inputs: the gradients, then the leaves of the state.
    """

    def __init__(self, plan: Plan, state: PyTree, update: Update, must: bool) -> None:
        self.plan, self.update, self.must, self.first = plan, update, must, len(plan.params)
        self.state, self.leaves = jax.tree.leaves(state), [*plan.params, *plan.leaves]
        self.updates: dict[str, LayerUpdate] = {}
        self.why: dict[str, str] = {}
        finds = not plan._offloads or _host_state.are_found(plan.mesh.devices.flat[0])
        try:
            with on_no_mesh():
                self.prove(finds)
        # Anything, because this traces the user's optimizer for shapes that it may not take. If the
        # update is wrong for its own shapes too, it raises the error itself after backward.
        except Exception as error:
            failed = f"its update cannot be traced: {error}"
            self.updates, self.why = {}, {leaf.path: failed for leaf in plan.params}
        for leaf in plan.params:
            unfound = "" if finds else f"JAX {jax.__version__} does not find layers in host memory"
            if leaf.path not in self.updates and (reason := _why_not(leaf) or unfound):
                self.why[leaf.path] = reason

    def without(self, paths: Sequence[str]) -> "InBackward":
        """Returns the same, but updates these after backward, because no gradient leads there."""
        fewer = copy.copy(self)
        fewer.updates = {path: each for path, each in self.updates.items() if path not in paths}
        fewer.why = self.why | dict.fromkeys(paths, "it has no gradient")
        return fewer

    def check(self, updates: Sequence[LayerUpdate]) -> None:
        """Raises where the user asks for updates in backward and there are none."""
        if updates or not self.must:
            return
        unread = "its only reader must be a scan over its layers, in no other loop or checkpoint"
        why = dict.fromkeys(self.updates, unread) or self.why
        unseen = set(why.values()) == {NO_STACK}
        listed = "; ".join(f"{path}: {reason}" for path, reason in list(why.items())[:3])
        named = "; stacked= names stacks, where the state is placed" * unseen
        raise ValueError(
            f"update='backward', and no parameter can be updated there ({listed}). Backward "
            "updates stacks of layers that one scan reads, not layers in a Python loop, with an "
            "optimizer that updates each element by itself (Adam and optax.clip do, a clip by a "
            f"norm does not){named}. Pass Schedule(update='auto'), which then updates after "
            "backward."
        )

    def prove(self, finds: bool) -> None:
        """Proves for each gradient that it suffices to update a device's part of a layer, or says
        why it does not."""
        may_be = [
            not _why_not(leaf) and (finds or not leaf.is_on_host) for leaf in self.plan.leaves
        ]
        streamed = {i for i, each in enumerate(may_be, self.first) if each}
        shapes = self.update.shapes
        self.sums = _rules.sums_of(self.update.traced(shapes), self.first, len(self.leaves))
        self.whole = InParts(self.update, shapes, streamed, self.plan._stacks, self.sums)
        self.origins = self.whole.full.origins(dict(enumerate(self.whole.full.invars)))
        params = [i for i, leaf in enumerate(self.plan.leaves, self.first) if leaf.kind == PARAMS]
        for part in self.whole.parts:
            for grad, param in enumerate(params):
                if param not in part.inputs:
                    continue
                path = self.leaves[grad].path
                try:
                    self.updates[path] = self.of_part(part, grad, param)
                except _UnprovedError as reason:
                    self.why[path] = str(reason)

    def of_part(self, part: Part, grad: int, param: int) -> LayerUpdate:
        """Returns the update of a device's part of one layer."""
        if not part.length:
            raise _UnprovedError(part.why or NO_STACK)
        # One of the stacks may be a copy of the last gradient, which reads nothing of the state.
        outputs, first = [i - self.first for i in part.inputs], len(self.plan.leaves)
        added = sorted(k for k in self.readers({grad, *part.inputs}) if k >= first)
        if others := [k for k in part.outputs if k not in {*outputs, *added}]:
            leaves = [self.plan.leaves[k] for k in others]
            reasons = (f"its {leaf.path}: {why}" for leaf in leaves if (why := _why_not(leaf)))
            raise _UnprovedError(next(reasons, TOGETHER))
        if any(map(self.whole.mixes, [*outputs, *added])):
            raise _UnprovedError(TOGETHER)
        if others := self.readers({grad}) - {*outputs, *added}:
            k = min(others)
            other = self.plan.leaves[k].path if k < first else "a sum"
            raise _UnprovedError(f"the update of other leaves reads its gradient: {other}")
        program = self.of_shard([*outputs, *added], grad)
        given = sorted(program.read() - {grad, *part.inputs})
        if any(i >= len(self.leaves) for i in given):
            raise _UnprovedError("the update reads a field that the loss returns")
        sharded = [i for i in given if self.leaves[i].update.dim is not None]
        if sharded or any(i < self.first or i in self.plan._stacks for i in given):
            raise _UnprovedError(TOGETHER)
        if any(isinstance(value, Tracer) for value in program.constants.values()):
            raise _UnprovedError("the update closes over a traced array")
        unknown = {v for v, value in program.constants.items() if value is None}
        if not unknown.isdisjoint(program.used):
            raise _UnprovedError(GLOBAL)
        stacks = (param, *(i for i in part.inputs if i != param))
        dtypes = [self.leaves[i].dtype for i in stacks]
        new = program.cut([program.outvars[part.inputs.index(i)] for i in stacks])
        sums = program.cut(program.outvars[len(outputs) :])

        def run(program: Flat, grad_of: Array, layers: Sequence[Array], read: Sequence[Array]):
            inputs: list[Any] = [None] * len(program.invars)
            layers = [as_stored(*pair) for pair in zip(layers, dtypes, strict=True)]
            for at, value in zip((grad, *stacks, *given), (grad_of, *layers, *read), strict=True):
                inputs[at] = value
            return list(map(as_float, program(inputs)))

        return LayerUpdate(
            tuple(i - self.first for i in stacks),
            tuple(i - self.first for i in given),
            functools.partial(run, new),
            lambda *args: list(map(total, run(sums, *args))),
            tuple(self.sums[k - first] for k in added),
        )

    def readers(self, inputs: Set[int]) -> set[int]:
        """Returns the results of the divided update that depend on some of its inputs."""
        outvars, origins = enumerate(self.whole.full.outvars), self.origins
        return {k for k, v in outvars if is_var(v) and not inputs.isdisjoint(origins.get(v, ()))}

    def of_shard(self, outputs: Sequence[int], grad: int) -> Flat:
        """Returns the program for a device's part of a layer.

        As for layers, each value of the trace of whole layers has a partner in that of a device's
        part, and a label says how they are related, along the dimension that is sharded.
        """
        if self.shard is None:
            raise _UnprovedError(OTHER_PROGRAM)
        shard, labels, mixers = self.shard
        for k in outputs:
            v = self.whole.one.outvars[k]
            leaf = self.plan.leaves[k] if k < len(self.plan.leaves) else self.leaves[grad]
            dim = leaf.update.dim
            if _rules.label(v, shard.outvars[k], labels) != (SAME if dim is None else dim):
                raise _UnprovedError(f"{mixers.get(v, 'the update')} mixes shards")
        program = shard.cut([shard.outvars[k] for k in outputs])
        if any(eqn.primitive.name in ("sharding_constraint", "shard_map") for eqn in program.eqns):
            raise _UnprovedError("the update names devices")
        return program

    @functools.cached_property
    def shard(self) -> tuple[Flat, dict[Var, Label], dict[Atom, str]] | None:
        """The trace of a device's part of layers with its labels; None if it is another program.

        What follows from all layers is a constant without a value.
        """
        shapes = list(self.update.shapes)
        dims: list[Label] = [SAME] * len(shapes)
        for i in self.plan._stacks:
            shape, place = self.leaves[i].shape, self.leaves[i].update
            dims[i] = SAME if place.dim is None else place.dim
            # The shape inside a step's `shard_map`.
            part = NamedSharding(self.plan.mesh, place.local).shard_shape(place.padded(shape))
            shapes[i] = jax.ShapeDtypeStruct((1, *part[1:]), shapes[i].dtype)
        try:
            shard = self.update.traced(shapes).divided(self.sums)
        except Exception:  # anything: the user's optimizer may take only its own shapes
            return None
        one, known = self.whole.one, {w for _, w in self.whole.before}
        if not one.is_like(shard):
            return None
        partners = dict(zip(self.whole.full.variables, shard.variables, strict=True))
        labels = _rules.labelled(one, shard, dims, lambda v, w: v in known)
        return shard.knowing({partners[v]: None for v, _ in self.whole.before}), *labels


def total(added: Array) -> Array:
    """Returns what a sum has of an array that it adds up: a float, as gradients are."""
    return jnp.sum(added.astype(wide(added.dtype)))


def _why_not(leaf: LeafPlan) -> str:
    """Returns '' if a device holds the part of each layer that it updates, or the whole layer."""
    if not by_layer(leaf):
        return "it is sharded over its layers" if leaf.stacked else NO_STACK
    if leaf.frozen:
        return "it is not updated"
    if leaf.experts is not None:  # a device's part of a layer is one along two dimensions
        return "its experts are apart"
    if leaf.update.padding:
        return "it is padded (pad=False replicates it)"
    whole = leaf.kind == PARAMS and leaf.rest.dim is None
    if not whole and leaf.rest.on_device != leaf.update:
        return "it is stored elsewhere than it is updated"
    # Codes, which a loop's backward carries as floats. XLA has no view of host memory as another
    # type: it would copy the stack to the devices, and back.
    if leaf.dtype == jnp.int8 and leaf.kind == OPT_STATE:
        return "it is quantized in host memory" if leaf.is_on_host else ""
    return "" if jnp.issubdtype(leaf.dtype, jnp.floating) else f"it is {leaf.dtype}"


# -- in the loop over layers that has their gradients

T = TypeVar("T")
Stacks: TypeAlias = dict[int, tuple[Array, ...]]  # by position: a parameter and its state
LayersRead: TypeAlias = dict[int, list[Array]]  # by the position of their parameter


@functools.partial(register_dataclass, data_fields=["given"], meta_fields=["apply"])
@dataclasses.dataclass(frozen=True)
class Updating:
    """How a loop updates a parameter, the `Held.update` of it; `Held.state` changes with it.

    `apply(grad, layers, given)` takes one layer of each stack, and returns the new layers.
    """

    given: tuple[Array, ...]
    apply: Callable[[Array, list[Array], Sequence[Array]], list[Array]]


class InLoop:
    """The `Hook` of a loop: updates a layer of its parameters, and writes it into their stacks."""

    def __init__(self, changing: Mapping[int, Held]) -> None:
        self.updating: dict[int, Updating] = {k: x.update for k, x in changing.items()}

    def read(self, stacks: Stacks, at: Layer, source: T) -> tuple[LayersRead, Stacks, T]:
        """Returns one layer of what the updates read, on the devices.

        Has the `source` of weights in host memory be read before they are written. XLA would copy
        their stacks there in each iteration.
        """
        if source and any(_compat.is_on_host(param) for param, *_ in stacks.values()):
            source, stacks = lax.optimization_barrier((source, stacks))
        layers = {
            k: [_compat.fetched(sliced(stack, at.of(stack))) for stack in stacks[k]]
            for k in self.updating
        }
        return layers, stacks, source

    def finish(
        self, stacks: Stacks, read: LayersRead, grads: Sequence[Any], at: Layer, left: T
    ) -> tuple[Stacks, T]:
        """Updates a layer, which was read, and writes it into the stacks."""
        layers, left = self.tied(stacks, read, left)
        changed: Stacks = {}
        for k, updating in self.updating.items():
            new = updating.apply(grads[k].shard, layers[k], updating.given)
            pairs = zip(stacks[k], new, strict=True)
            changed[k] = tuple(_put(stack, layer, at) for stack, layer in pairs)
        return changed, left

    def tied(self, stacks: Stacks, layers: LayersRead, left: T) -> tuple[LayersRead, T]:
        """Has what comes from host memory arrive with a weight's gradient, which nobody waits for.

        XLA would have all compute of an iteration wait for it. The last gradient here is the first
        that backward has, so that updating and writing back hide behind the others. (Where copies
        take longer than compute, half of them would better come with later ones, so that they meet
        those on the way back: 7.5B on 8 H100s, JAX 0.12, all with the first: 553 ms at 50 GB/s, 778
        at 25, 1369 at 12.5; each with the gradient of its own weight: 591, 719, 1053.)
        """
        grads, treedef = jax.tree.flatten(left)
        if not grads or not any(map(_compat.is_on_host, jax.tree.leaves(stacks))):
            return layers, left
        layers, grads[-1] = lax.optimization_barrier((layers, grads[-1]))
        return layers, treedef.unflatten(grads)


def _put(stack: Array, layer: Array, at: Layer) -> Array:
    layer = layer.astype(stack.dtype)
    stored = _compat.stored(layer) if _compat.is_on_host(stack) else layer
    return written(stack, stored, at.of(stack))
