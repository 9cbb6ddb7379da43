"""Which parameters a step can update in backward, each layer as soon as its gradient is there."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax._update import parts as _parts, rules as _rules
from zerojax._update.parts import OTHER_PROGRAM, Flat, Part, Update
from zerojax._update.rules import MIXED, SAME, Label

NO_STACK = "the plan does not take it for a stack of layers"


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of an update: a gradient, or a leaf of the state.

    `dim` is its sharded dimension, `part` the shape of a device's part. `param` is, for a gradient,
    the position of its parameter among the inputs. `is_updated`: it may be updated in backward.
    """

    shape: Any
    stacked: bool
    dim: int | None
    part: tuple[int, ...]
    is_updated: bool = False
    param: int | None = None

    def of_layer(self) -> Any:
        """Returns the shape of a device's part of one layer."""
        if not self.stacked:
            return self.shape
        return jax.ShapeDtypeStruct((1, *self.part[1:]), self.shape.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerUpdate:
    """The update of a device's part of one layer.

    By positions among the update's inputs: the gradient; the stacks that are updated, the parameter
    first; what is read besides. `results` are those of `program` in the order of `stacks`.
    """

    grad: int
    stacks: tuple[int, ...]
    given: tuple[int, ...]
    program: Flat
    results: tuple[int, ...]

    def __call__(self, grad: Any, layers: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Returns the new layers."""
        inputs: list[Any] = [None] * len(self.program.invars)
        places = (self.grad, *self.stacks, *self.given)
        for at, value in zip(places, (grad, *layers, *given), strict=True):
            inputs[at] = value
        done = _parts.run(self.program, inputs)
        return [done[k] for k in self.results]


def layer_updates(
    function: Callable[[list], list], inputs: Sequence[Input], first: int
) -> tuple[dict[int, LayerUpdate], dict[int, str]]:
    """Returns what is proved to need nothing but its own layer, and elsewhere why not, both by the
    position of the gradient.

    `function` maps the inputs to the next values of those from `first` on.
    """
    stacked = [one.stacked for one in inputs]
    updated = [one.is_updated for one in inputs]
    update = Update(function, [one.shape for one in inputs], updated, stacked)
    read = _parts.origins(update.full, [one.param is not None for one in inputs])
    grads_of = [read.get(v, frozenset()) for v in update.full.outvars]
    found: dict[int, LayerUpdate] = {}
    why: dict[int, str] = {}
    for part in update.parts:
        for grad in (i for i, one in enumerate(inputs) if one.param in part.inputs):
            others = [k for k, grads in enumerate(grads_of) if grad in grads]
            made = _of_part(update, part, inputs, first, grad)
            if isinstance(made, str):
                why[grad] = made
            elif not set(others) <= {i - first for i in part.inputs}:
                why[grad] = "the update of other leaves reads its gradient"
            else:
                found[grad] = made
    return found, why


def _of_part(
    update: Update, part: Part, inputs: Sequence[Input], first: int, grad: int
) -> LayerUpdate | str:
    """Returns the update of a device's part of one layer, or why there is none."""
    if not part.by_layer:
        return part.why or NO_STACK
    part_outputs = set(part.outputs)
    # Among the stacks may be a copy of the last gradient, which reads nothing of the state.
    part = dataclasses.replace(part, outputs=tuple(i - first for i in part.inputs))
    if not part_outputs <= set(part.outputs) or any(map(update.mixes, part.outputs)):
        return "the update reads it with other leaves"
    layer = update.of_layer([part])
    if any(i >= len(inputs) for i in _parts.inputs_of(layer)):
        return "the update reads something of all gradients, which is known after backward"
    program = _of_shard(update, part, inputs, first)
    if isinstance(program, str):
        return program
    given = _parts.inputs_of(program) - {grad, *part.inputs}
    others = [inputs[i] for i in given]
    if any(one.stacked or one.param is not None or one.dim is not None for one in others):
        return "the update reads it with other leaves"
    param: Any = inputs[grad].param
    stacks = (param, *(i for i in part.inputs if i != param))
    results = tuple(part.outputs.index(i - first) for i in stacks)
    return LayerUpdate(grad, stacks, tuple(sorted(given)), program, results)


def _of_shard(update: Update, part: Part, inputs: Sequence[Input], first: int) -> Flat | str:
    """Returns the program for a device's part of a layer, if it is proved to compute just that.

    As for layers: each value of the trace of whole layers has a partner in that of a device's part,
    and a label says how they are related, along the dimension that is sharded.
    """
    whole = update.one
    try:
        shard = _parts.traced(update.function, [one.of_layer() for one in inputs])
    except Exception:  # an update may be for its own shapes alone
        return OTHER_PROGRAM
    if not _parts.same_equations(whole.eqns, shard.eqns):
        return OTHER_PROGRAM
    labels: dict[Any, Label] = {
        v: SAME if one.dim is None or not one.stacked else one.dim
        for v, one in zip(whole.invars, inputs, strict=True)
    }
    pairs = zip(whole.constants.items(), shard.constants.values(), strict=True)
    labels |= {v: SAME if a is b else MIXED for (v, a), b in pairs}
    mixers: dict[Any, str] = {}
    for a, b in zip(whole.eqns, shard.eqns, strict=True):
        found = _parts.through(a, b, labels)
        mixed = [mixers[v] for v in _parts.reads(a) if v in mixers]
        for v, label in zip(a.outvars, found, strict=True):
            labels[v] = label
            if label == MIXED:
                mixers[v] = mixed[0] if mixed else a.primitive.name
    for k in part.outputs:
        v, dim = whole.outvars[k], inputs[first + k].dim
        if _rules.label(v, shard.outvars[k], labels) != (SAME if dim is None else dim):
            return f"{mixers.get(v, 'the update')} mixes shards"
    program = _parts.needed(shard, [shard.outvars[k] for k in part.outputs])
    if any(eqn.primitive.name in ("sharding_constraint", "shard_map") for eqn in program.eqns):
        return "the update names devices"
    return program
