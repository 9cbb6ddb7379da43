"""Layers in a Python loop, rolled up: consecutive pieces of a loss that are alike run as one scan
over stacks of their weights, which a step makes of its shards.

Gains what the loop over layers gains, for models without one: 24 checkpointed layers of 2048, 4 x
1024 tokens each on 8 H100s, peak at 4.7 GiB in place of 7.2, and take 117 ms in place of 119.
Without a checkpoint (`roll=True`) they peak at 15.2 GiB in place of 19.5, and take 125 ms in place
of 95. Costs a copy of the shards, in the dtype in which they travel, and 460 lines of code with
`runs.py`.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from zerojax import _compat
from zerojax._jaxprs import (
    ELEMENTWISE,
    MOVING,
    Atom,
    Inliner,
    Var,
    common_path,
    is_checkpoint,
    is_var,
    reads,
    running,
    same_as,
    type_of,
    unclosed,
    unique,
)
from zerojax._kernel.places import LeafPlan, Placement
from zerojax._passes.loss import Feed, Loss, Stack
from zerojax._passes.one_device import typed
from zerojax._passes.runs import LEAST, Codecs, Place, Repeats, Stretch, made_by

Arrays: TypeAlias = list[Array]

# [Note: rolling a loop up]
# The equations of a loss are a list. Layers in a Python loop leave a run in it that repeats: from
# some equation on, each is like the one a *period* later. A layer begins where the fewest bytes
# pass. Each operand in a layer is made by this layer, or carried from the layer before, or comes
# from outside of the loop. From outside, it is the same for all layers, or each layer has another
# one; the loop scans over these. What comes from weights only (casts, say, that the loss made of
# all weights before the first layer) moves into the loop, so that the engine finds stacks of
# parameters there.

# [Note: what a rolled layer keeps]
# Between layers in a Python loop, XLA keeps what it does not fuse: the results of matmuls and
# reductions. A scan keeps what JAX does, each residual of each layer, wide casts among them. So a
# rolled layer without a checkpoint of the user's computes these again. It keeps what `lt` returns,
# such as a dropout mask: without masks it would keep the random bits, four times the bytes.
FUSED = (ELEMENTWISE - {"lt"}) | MOVING | {"iota", "name"}


def _stacked_leaf(leaves: Sequence[LeafPlan]) -> LeafPlan:
    """Returns the plan of a stack, from those of its layers."""
    first = leaves[0]

    def over(place: Placement) -> Placement:
        padding = place.padding and (0, *place.padding)
        return dataclasses.replace(place, spec=PartitionSpec(None, *place.spec), padding=padding)

    return dataclasses.replace(
        first,
        path=common_path([leaf.path for leaf in leaves]),
        shape=(len(leaves), *first.shape),
        stacked=True,
        rest=over(first.rest),
        near=over(first.near),
        grad=first.grad and over(first.grad),
        update=over(first.update),
    )


def may_roll(loss: Loss, when: bool | str, is_sharded: bool) -> bool:
    """Whether to look for layers in a loss: the user asks for it, or enough of its weights are
    alike, or are read by calls of `jax.checkpoint`."""
    if when != "auto" or not is_sharded:
        return when is True
    alike = Counter((leaf.shape, leaf.dtype) for leaf in loss.params)
    outside = Inliner().flat(loss.jaxpr.eqns)
    return max(alike.values(), default=0) >= LEAST or any(map(is_checkpoint, outside))


def roll(loss: Loss, codecs: Sequence[Codecs], when: bool | str, is_sharded: bool) -> Loss:
    """Returns the loss with rolled layers. Call it where JAX traces the code of one device.

    Each parameter travels in its `codecs`; `when` is the option `roll=`.
    """
    if not is_sharded:
        return loss.noting("roll=True rolls up nothing: no parameter is sharded (stage 3)")
    search = Repeats(loss.jaxpr, loss.params, codecs)
    loops, notes, stacked = list[_Scanned](), list[str](), set[int]()
    for run in search.runs(0, len(search.eqns)):
        loop = _Scanned(search, run)
        # A weight that two loops read would be gathered by both.
        if not (loop.stacks and loop.carried and stacked.isdisjoint(loop.weights)):
            continue
        if when != "auto" or loop.is_checkpointed:
            loops.append(loop)
            stacked |= loop.weights
            notes.append(f"{loop} are rolled up, {run.count} iterations of a loop")
        else:
            notes.append(
                f"{loop} stay a Python loop, because no jax.checkpoint (nn.remat, nnx.remat) is "
                "around each: Schedule(roll=True) needs less memory and, on GPUs, more time"
            )
    notes += _left(search, [loop.run for loop in loops])
    if when is True and not notes:
        alike = f"no {LEAST} layers in a row are alike, each with weights of its own"
        notes = [f"roll=True rolls up nothing: {alike}"]
    return (_Rolling(search, loops).rolled(loss) if loops else loss).noting(*notes)


def _left(search: Repeats, runs: Sequence[Stretch]) -> Iterator[str]:
    """Says which calls of `jax.checkpoint` stay as they are, and why."""
    rolled = {i for run in runs for i in range(run.start, run.stop)}
    eqns = [(i, eqn) for i, eqn in enumerate(search.eqns) if i not in rolled]
    calls = [i for i, eqn in eqns if is_checkpoint(eqn) and search.reads_weights(eqn)]
    alike = Counter(search.keys[i] for i in calls)
    why = Counter(
        "which print or call the host"
        if _compat.has_side_effects(search.eqns[i])
        else "alike, but not one after another with weights of their own on the devices"
        if alike[search.keys[i]] >= LEAST
        else "too few of them alike"
        for i in calls
    )
    for reason, count in why.items():
        yield f"not rolled up: {count} call{'s' * (count > 1)} of jax.checkpoint, {reason}"


class _Rolling:
    """A loss with loops in place of their layers, and its parameters in stacks."""

    def __init__(self, search: Repeats, loops: Sequence["_Scanned"]) -> None:
        self.search, self.loops = search, loops
        self.stacks = {stack: self.brought_in(stack) for loop in loops for stack in loop.stacks}

    def brought_in(self, stack: Stack) -> Var:
        """Returns a variable for a stack."""
        var = self.search.loss.invars[stack[0]]
        aval = ShapedArray((len(stack), *type_of(var).shape), type_of(var).dtype)
        return _compat.fresh(var, aval)

    def rolled(self, loss: Loss) -> Loss:
        search, constants = self.search, self.search.inliner.constants
        inputs = [*self.stacks.values(), *search.loss.invars, *constants]
        avals = list(map(type_of, inputs))
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        shapes = typed(shapes, jax.sharding.get_abstract_mesh())
        trace = jax.make_jaxpr(lambda *values: self.run(dict(zip(inputs, values, strict=True))))
        jaxpr, more = unclosed(trace(*shapes))
        jaxpr = _compat.without_unread(jaxpr)
        read = {v for eqn in jaxpr.eqns for v in reads(eqn)} | {*filter(is_var, jaxpr.outvars)}
        first, last = len(self.stacks), len(self.stacks) + len(search.leaves)
        inside = {at for stack in self.stacks for at in stack}
        params = enumerate(jaxpr.invars[first:last])
        single = {at: v for at, v in params if v in read or at not in inside}
        invars = [*jaxpr.invars[:first], *single.values(), *jaxpr.invars[last:]]
        leaves = [_stacked_leaf([loss.params[at] for at in stack]) for stack in self.stacks]
        return dataclasses.replace(
            loss,
            jaxpr=_compat.make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars),
            params=(*leaves, *(loss.params[at] for at in single)),
            feed=Feed((*self.stacks,), (*single,)),
            constants=(*loss.constants, *constants.values(), *more),
        )

    def run(self, env: dict[Var, Array]) -> list[Array]:
        """Returns the outputs of the loss, from its inputs."""
        search, at = self.search, 0
        for loop in self.loops:
            self.run_between(at, loop.run.start, env)
            stacks = [env[self.stacks[stack]] for stack in loop.stacks]
            env |= loop.results(stacks, functools.partial(self.value, env))
            at = loop.run.stop
        self.run_between(at, len(search.eqns), env)
        return [self.value(env, v) for v in search.outvars]

    def run_between(self, start: int, stop: int, env: dict[Var, Array]) -> None:
        """Runs the equations between two, and adds to `env` what later ones read."""
        search, eqns = self.search, self.search.eqns[start:stop]
        made = {v: None for eqn in eqns for _, v in made_by(eqn)}
        inputs = unique(v for eqn in eqns for v in reads(eqn) if v not in made)
        outs = [v for v in made if search.last_read.get(v, -1) >= stop]
        jaxpr = _compat.make_jaxpr(eqns, inputs, outs)
        results = _compat.run_jaxpr(jaxpr, [self.value(env, v) for v in inputs])
        env |= dict(zip(outs, results, strict=True))

    def value(self, env: dict[Var, Array], atom: Atom) -> Array:
        """Returns the value of an operand. What layers make of weights only is made again."""
        if not is_var(atom):
            return jnp.asarray(atom.val, type_of(atom).dtype)
        if atom not in env:
            eqn = self.search.eqns[self.search.made[atom][0]]
            results = _compat.bind(eqn, [self.value(env, v) for v in eqn.invars])
            env |= {v: results[k] for k, v in made_by(eqn)}
        return env[atom]


class _Scanned:
    """A run as a scan."""

    def __init__(self, search: Repeats, run: Stretch) -> None:
        self.search, self.run = search, run
        self.shared: dict[Atom, Var] = {}
        self.carried: dict[Hashable, tuple[Place, Atom, Var]] = {}  # by place and first value
        self.scanned: dict[Hashable, tuple[tuple[Atom, ...], Var]] = {}
        self.stacks: dict[Stack, Var] = {}
        self.before: list[JaxprEqn] = []  # what comes from weights only, in each layer
        self.moved: dict[tuple[Atom, ...], Var] = {}
        layers = [search.eqns[run.layer(k)] for k in range(run.count)]
        self.body = [self.in_body(eqns) for eqns in zip(*layers, strict=True)]

    def __str__(self) -> str:
        def depth(names: list[list[str]]) -> int:
            return next(k for k, n in enumerate(zip(*names, strict=False)) if len({*n}) > 1)

        paths = [[self.search.leaves[at].path.split("/") for at in stack] for stack in self.stacks]
        # A turn may end before a norm, and the first read the embedding's, not a layer's.
        [(common, _)] = Counter(map(depth, paths)).most_common(1)
        rows = zip(*(names for names in paths if depth(names) == common), strict=True)
        names = [name for row in rows for name in row]
        first, *_, last = unique(name[common] for name in names)
        return "/".join([*names[0][:common], f"{first} to {last}"])

    @functools.cached_property
    def weights(self) -> set[int]:
        """The positions of the parameters in its stacks."""
        return set().union(*self.stacks)

    @property
    def is_checkpointed(self) -> bool:
        """Whether `jax.checkpoint` is around all that reads weights."""
        own = {*self.stacks.values(), *self.moved.values()}
        readers = [eqn for eqn in self.body if not own.isdisjoint(reads(eqn))]
        return all(map(is_checkpoint, readers))

    def in_body(self, eqns: Sequence[JaxprEqn]) -> JaxprEqn:
        """Returns an equation of the loop's body, from that of each layer."""
        invars = list(map(self.operand, zip(*(eqn.invars for eqn in eqns), strict=True)))
        return one_for_all([eqns[0].replace(invars=invars), *eqns[1:]], self.one_of)

    def operand(self, atoms: tuple[Atom, ...]) -> Atom:
        """Returns an operand in the loop's body, from that of each layer."""
        of_second = self.search.operand(self.run, 1, atoms[1])
        if of_second.ago == 0:
            return atoms[0]
        if of_second.ago == 1:
            assert of_second.place is not None
            key, var = (of_second.place, same_as(atoms[0])), _compat.fresh(atoms[1])
            return self.carried.setdefault(key, (of_second.place, atoms[0], var))[-1]
        return self.from_outside(atoms)

    def from_outside(self, atoms: tuple[Atom, ...]) -> Atom:
        first, search = atoms[0], self.search
        if len({*map(same_as, atoms)}) == 1:
            return self.shared.setdefault(first, _compat.fresh(first)) if is_var(first) else first
        if all(is_var(v) and v in search.params for v in atoms):
            stack = tuple(search.params[v] for v in atoms if is_var(v))
            return self.stacks.setdefault(stack, _compat.fresh(first))
        if not all(is_var(v) and v in search.weights for v in atoms):
            return self.one_of(atoms)
        if atoms not in self.moved:
            self.moved[atoms] = self.made_in_loop(atoms)
        return self.moved[atoms]

    def one_of(self, atoms: tuple[Atom, ...]) -> Var:
        key = tuple(map(same_as, atoms))
        return self.scanned.setdefault(key, (atoms, _compat.fresh(atoms[0])))[-1]

    def made_in_loop(self, atoms: tuple[Atom, ...]) -> Var:
        """Moves what makes something of each layer's weights into the loop."""
        places = [self.search.made[v] for v in atoms if is_var(v)]
        eqns = [self.search.eqns[i] for i, _ in places]
        each = zip(*(eqn.invars for eqn in eqns), strict=True)
        eqn = eqns[0].replace(invars=list(map(self.from_outside, each)))
        eqn = one_for_all([eqn, *eqns[1:]], self.one_of)
        eqn = eqn.replace(outvars=list(map(_compat.fresh, eqn.outvars)))
        self.before.append(eqn)
        return eqn.outvars[places[0][1]]

    def results(self, stacks: list[Array], value: Callable[[Atom], Array]) -> dict[Var, Array]:
        """Runs the loop, and returns what equations after it read."""
        used = self.used_later()
        places = [place for place, *_ in self.carried.values()]
        outs = unique(place for _, place in used.values())
        made = [self.body[i].outvars[k] for i, k in [*places, *outs]]
        inputs = [var for *_, var in (*self.carried.values(), *self.scanned.values())]
        inputs = [*self.shared.values(), *inputs, *self.stacks.values()]
        body = _compat.make_jaxpr([*self.before, *self.body], inputs, made)
        shared = list(map(value, self.shared))
        carried = [value(v) for _, v, _ in self.carried.values()]
        scanned = [jnp.stack(list(map(value, atoms))) for atoms, _ in self.scanned.values()]

        def layer(carry: list[Array], xs: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            scanned, weights = xs
            values = _compat.run_jaxpr(body, [*shared, *carry, *scanned, *weights])
            return values[: len(carry)], values[len(carry) :]

        if not self.is_checkpointed:
            layer = jax.checkpoint(layer, policy=_keeps, prevent_cse=False)
        carried, ys = lax.scan(layer, carried, (scanned, stacks), length=self.run.count)
        last, outputs = dict(zip(places, carried, strict=True)), dict(zip(outs, ys, strict=True))

        def of(number: int, place: Place) -> Array:
            is_last = number == self.run.count - 1 and place in last
            return last[place] if is_last else outputs[place][number]

        return {v: of(*at) for v, at in used.items()}

    def used_later(self) -> dict[Var, tuple[int, Place]]:
        """Returns what equations after the loop read, with its layer and its place in that."""
        run, used = self.run, {}
        for i in range(run.start, run.stop):
            for k, v in made_by(self.search.eqns[i]):
                is_read = self.search.last_read.get(v, -1) >= run.stop
                if is_read and v not in self.search.weights:
                    number, place = divmod(i - run.start, run.period)
                    used[v] = number, (place, k)
        return used


def one_for_all(eqns: Sequence[JaxprEqn], operand: Callable[[tuple[Atom, ...]], Var]) -> JaxprEqn:
    """Returns the first of alike equations, in a scope that names all of theirs.

    Where literals in what it opens differ, they become operands of it: `operand` returns the
    variable for those of all equations.
    """
    eqn = _compat.in_common_scope(eqns)
    if not is_checkpoint(eqn):
        return eqn
    jaxprs = [_compat.inner_jaxpr(eqn)[0] for eqn in eqns]
    if all(jaxpr is jaxprs[0] for jaxpr in jaxprs):
        return eqn
    inner: dict[Var, Var] = {}  # operands, and their names in the jaxpr

    def inside(literals: tuple[Atom, ...]) -> Var:
        outer = operand(literals)
        return inner.setdefault(outer, _compat.fresh(outer))

    def joined(atoms: tuple[Atom, ...]) -> Atom:
        differ = not is_var(atoms[0]) and len({*map(same_as, atoms)}) > 1
        return inside(atoms) if differ else atoms[0]

    body = []
    for each in zip(*(jaxpr.eqns for jaxpr in jaxprs), strict=True):
        operands = zip(*(one.invars for one in each), strict=True)
        first = each[0].replace(invars=list(map(joined, operands)))
        body.append(one_for_all([first, *each[1:]], inside))
    jaxpr = _compat.make_jaxpr(body, [*jaxprs[0].invars, *inner.values()], jaxprs[0].outvars)
    return running(eqn, jaxpr).replace(invars=[*eqn.invars, *inner])


def _keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in FUSED
