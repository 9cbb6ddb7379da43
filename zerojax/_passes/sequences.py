"""Splits the sequences of a loss over a mesh axis, whatever the model.

The loss is one of whole sequences, and so are its numbers: `block_runner.py` says how.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
from collections.abc import Callable, Sequence

from jax import Array

from zerojax._jaxprs import type_of
from zerojax._passes.block_runner import BlockRunner, Layouts, TokenRule, Tracked
from zerojax._passes.blocks import Axis, Blocks
from zerojax._passes.control import CONTROL
from zerojax._passes.kernels import KERNEL, shared
from zerojax._passes.loss import Loss
from zerojax._passes.mixing import CUDNNS, MIXING, fused_attention, multiplied
from zerojax._table import human_bytes, summed


def rule_of(name: str, mixes: bool) -> TokenRule | None:
    if name.startswith(CUDNNS):
        return fused_attention
    always: dict[str, TokenRule] = {"dot_general": multiplied, KERNEL: shared}
    return always.get(name) or (MIXING.get(name) if mixes else None)


def split_sequences(
    loss: Loss,
    axis: str,
    size: int,
    dims: Sequence[int | None],
    may_stay: Sequence[bool],
    most_gathered: float,
) -> Loss:
    """Returns a loss of which each device of a mesh axis computes its block of the tokens.

    `dims` says which dimension of each argument is in blocks. The results are whole, but leaves of
    the aux that `may_stay` in blocks: `out_dims` says along which dimension they are.
    """
    runner = BlockRunner(Axis(axis, size), CONTROL, rule_of, most_gathered)
    out_dims = list[int | None]()
    places = [None if dim is None else Blocks(dim) for dim in (*[None] * len(loss.params), *dims)]

    def returned(outs: list[Tracked]) -> list[Array]:
        runner.check(runner.regions[0])
        out_dims.clear()
        results: list[Array] = []
        for value, stays in zip(outs, (False, *may_stay), strict=True):
            at = runner.natural(value)
            is_even = at and at.is_plain and value.shape[at.dim] % size == 0
            at = at if stays and is_even and at and at.dim else None
            out_dims.append(at and at.dim)
            results.append(runner.array(value, at, loss.jaxpr.eqns[-1]))
        runner.known = [{}]  # users' derivatives run later, on other arrays
        return results

    result = run_on_blocks(runner, loss, places, returned)
    return dataclasses.replace(result, out_dims=tuple(out_dims[1:]))


def run_on_blocks(
    runner: BlockRunner,
    loss: Loss,
    places: Layouts,
    returned: Callable[[list[Tracked]], list[Array]],
) -> Loss:
    """Returns a loss that takes its first inputs in these blocks, and returns what is `returned` of
    its outputs. Its notes say what is sent, most first."""
    variables = loss.jaxpr.invars
    places = [*places, *[None] * (len(variables) - len(places))]
    shapes = [type_of(v).shape for v in variables]
    triples = zip(variables, shapes, places, strict=True)
    types = [v.aval.update(shape=runner.axis.local(shape, at)) for v, shape, at in triples]

    def code(*arrays: Array) -> list[Array]:
        inputs = [Tracked(*each) for each in zip(shapes, arrays, places, strict=True)]
        return returned(runner.run(loss.jaxpr, (), inputs))

    result = loss.retraced(code, *types)
    totals = summed((runner.said(each), each.nbytes) for each in runner.regions[0].sent)
    name = runner.axis.name
    notes = [
        f"{name}: each device receives {human_bytes(nbytes)} of {what} in forward"
        for what, nbytes in totals.most_common()
    ]
    return result.noting(*notes)
