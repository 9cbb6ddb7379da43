"""Reads, inlines and compares jaxprs.

Only this module and `_compat` read the parameters of equations.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._types import PyTree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom = Var | Literal


def primitives(names: str) -> frozenset[str]:
    return frozenset(names.split())


# What primitives do. An elementwise one computes each element of its result from those at the same
# place, and a moving one puts elements elsewhere. A linear one is linear in all of its operands.
ELEMENTWISE = primitives("""
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj
convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2
expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not optimization_barrier or population_count pow real reduce_precision rem round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sqrt square stop_gradient sub tan tanh xor
""")
MOVING = primitives("""
broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze stack transpose
""")
LINEAR = MOVING | primitives("""
add add_any convert_element_type copy cumsum neg optimization_barrier pcast psum psum_invariant
pvary reduce_sum stop_gradient sub
""")
RAGGED = "ragged_dot_general"
# What the functions that make such equations take as it is.
OPTIONS = {
    "scan": ("length", "reverse", "unroll"),
    RAGGED: ("precision", "preferred_element_type"),
    **dict.fromkeys(_compat.REMAT, ("policy", "prevent_cse")),
}
# Sizes of what primitives take of an operand, or of their result.
SIZED = dict.fromkeys(("iota", "broadcast_in_dim", "random_bits"), "shape") | {
    **{"slice": "limit_indices", "dynamic_slice": "slice_sizes", "gather": "slice_sizes"},
    "reshape": "new_sizes",
}


class HasOutputs(_compat.HasEffects, Protocol):
    """An equation, or something that stands for several."""

    @property
    def outvars(self) -> list[Var]: ...


S = TypeVar("S", bound=HasOutputs)
T = TypeVar("T")


def is_var(atom: Atom | None) -> "TypeIs[Var]":
    return atom is not None and not isinstance(atom, Literal)


def type_of(atom: Atom) -> ShapedArray:
    """Returns the type of an array. JAX's annotations say only that it has some type."""
    aval: Any = atom.aval
    return aval


def is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.CALLS


def is_function(eqn: JaxprEqn) -> bool:
    """Whether an equation only runs a jaxpr, with whatever derivative."""
    has_rule = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    return is_call(eqn) or is_checkpoint(eqn) or has_rule


def _made_by(value: Any) -> tuple[JaxprEqn, int] | None:
    """Returns the equation that a tracer of a jaxpr is a result of, and at which place."""
    eqn = getattr(value, "parent", None) if isinstance(value, Tracer) else None
    return eqn and (eqn, eqn.outvars.index(value.val))


def source(value: Any, made_by: Callable[[Any], tuple[JaxprEqn, int] | None] = _made_by) -> Any:
    """Returns the value that a tracer has, where calls, scans and branches return it as it came and
    transposes undo each other."""
    origin, axes = value, list[int]()  # which axis of the operand each axis of the value is
    while (made := made_by(value)) and (at := _operand_of(*made)) is not None:
        value, order = made[0].invars[at], made[0].params.get("permutation")
        axes = [order[axis] for axis in axes or range(len(order))] if order else axes
        origin = value if axes == sorted(axes) else origin
    return origin


def _operand_of(eqn: JaxprEqn, at: int) -> int | None:
    """Returns which operand of a call, a scan, a branch or a transpose its result `at` is, if any,
    whatever the order of its axes."""
    if not is_function(eqn) and eqn.primitive.name not in ("scan", "cond"):
        return 0 if eqn.primitive.name == "transpose" else None
    bodies = _compat.inner_jaxprs(eqn)
    places = {_input_of(body, at) for body in bodies}
    if len(places) != 1 or (place := places.pop()) is None:
        return None
    place += len(eqn.invars) - len(bodies[0].invars)
    carry = Eqn(eqn).parts(range(len(eqn.invars)))[1] if eqn.primitive.name == "scan" else []
    # A scan may swap its carries, stack a constant, or return its last row.
    is_other = place in carry and carry.index(place) != at
    is_other |= type_of(eqn.invars[place]).shape != type_of(eqn.outvars[at]).shape
    return None if is_other else place


def _input_of(jaxpr: Jaxpr, at: int) -> int | None:
    """Returns which input of a jaxpr its output `at` is, if any."""
    made = {v: (eqn, at) for eqn in jaxpr.eqns for at, v in enumerate(eqn.outvars)}
    var = source(jaxpr.outvars[at], lambda v: made.get(v) if is_var(v) else None)
    return jaxpr.invars.index(var) if is_var(var) and var in jaxpr.invars else None


class Inliner:
    """Expands calls, and remembers what became of their outputs and constants."""

    def __init__(self) -> None:
        self.aliases: dict[Var, Atom] = {}
        self.constants: dict[Var, ArrayLike] = {}

    def named(self, atom: Atom) -> Atom:
        """Returns the variable for which an output of an expanded call is another name."""
        while is_var(atom) and atom in self.aliases:
            atom = self.aliases[atom]
        return atom

    def resolved(self, eqn: JaxprEqn) -> JaxprEqn:
        return eqn.replace(invars=[self.named(v) for v in eqn.invars])

    def flat(
        self, eqns: Iterable[JaxprEqn], expands: Callable[[JaxprEqn], JaxprEqn | bool] = is_call
    ) -> Iterator[JaxprEqn]:
        """Yields the equations. Where `expands` holds of a call, its equations replace it, at any
        depth, or those of the call that `expands` returns."""
        for eqn in map(self.resolved, eqns):
            if call := expands(eqn):
                yield from self.flat(self.expand(eqn if call is True else call), expands)
            else:
                yield eqn

    def flat_of(self, eqns: Iterable[JaxprEqn], variables: Iterable[Var]) -> list[JaxprEqn]:
        """Returns the equations. Those of a call replace it where it takes some of these variables,
        or what is computed from them."""
        touched = set(variables)

        def expands(eqn: JaxprEqn) -> bool:
            if touched.isdisjoint(reads(eqn)):
                return False
            touched.update(eqn.outvars)
            return is_call(eqn)

        return list(self.flat(eqns, expands))

    def expand(self, call: JaxprEqn) -> list[JaxprEqn]:
        """Returns the equations of a call, each variable under a name of its own."""
        jaxpr, consts = _compat.inner_jaxpr(call)
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, call.invars, strict=True))

        def rename(var: Var) -> Atom:
            if isinstance(var, DropVar):
                return var
            if var not in names:
                names[var] = _compat.fresh(var)
            return names[var]

        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = const = _compat.fresh(var)
            self.constants[const] = value
        for outer, inner in zip(call.outvars, jaxpr.outvars, strict=True):
            if isinstance(outer, DropVar):
                continue
            if is_var(inner) and inner not in names:
                names[inner] = outer
            else:  # an input, a literal, or a value returned twice
                self.aliases[outer] = rename(inner) if is_var(inner) else inner
        return [_compat.renamed(eqn, rename, call) for eqn in jaxpr.eqns]


def read(env: Mapping[Var, Any], atoms: Iterable[Atom]) -> list[Any]:
    """Returns the values of operands."""
    return [env[v] if is_var(v) else v.val for v in atoms]


def evaluate(eqns: Iterable[JaxprEqn], env: dict[Var, Any]) -> None:
    """Runs equations on the values in `env`, and adds their results to it."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, _compat.bind(eqn, read(env, eqn.invars)), strict=True))


def reads(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [v for v in eqn.invars if is_var(v)]


def alive(
    steps: Sequence[S], outvars: Iterable[Atom], reads_of: Callable[[S], Iterable[Var]]
) -> list[S]:
    """Returns the steps that have effects, or whose results something reads."""
    live = {v for v in outvars if is_var(v)}
    kept = []
    # Backwards, so that the loop sees the readers of a result before the step that makes it.
    for step in reversed(steps):
        if live.intersection(step.outvars) or _compat.has_side_effects(step):
            live.update(reads_of(step))
            kept.append(step)
    return kept[::-1]


def unclosed(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """Returns a jaxpr whose constants are its last inputs, and the constants."""
    jaxpr, consts = _compat.opened(closed)
    invars = [*jaxpr.invars, *jaxpr.constvars]
    return _compat.make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars), consts


def inferred(
    jaxpr: Jaxpr, inputs: Sequence[T], unknown: T, rule: Callable[[JaxprEqn, list[T]], Sequence[T]]
) -> list[T]:
    """Returns a fact about each output, from one about each input. `rule` returns the facts about
    the outputs of an equation, from those about its operands. Literals and constants are
    `unknown`."""
    facts: dict[Var, T] = dict(zip(jaxpr.invars, inputs, strict=True))

    def fact(atom: Atom) -> T:
        return facts.get(atom, unknown) if is_var(atom) else unknown

    for eqn in jaxpr.eqns:
        facts.update(zip(eqn.outvars, rule(eqn, list(map(fact, eqn.invars))), strict=True))
    return list(map(fact, jaxpr.outvars))


# -- parameters of equations


class Eqn:
    """An equation's parameters, each by its name in JAX: those that its primitive has and that are
    not None, and those with a value here."""

    axes: tuple[PyTree, ...] = ()
    axis: int = -1
    axis_name: str | tuple[str, ...] = ()
    base_dilation: tuple[int, ...]
    batch_group_count: int
    body_nconsts: int
    broadcast_dimensions: tuple[int, ...]
    compiler_params: object = None
    cond_jaxpr: ClosedJaxpr
    cond_nconsts: int
    dimension: int
    dimension_numbers: PyTree  # of a gather, a scatter or a convolution
    dimensions: tuple[int, ...] = ()
    dropout_rate: float
    fft_lengths: tuple[int, ...]
    fill_value: float | None = None
    grid_mapping: PyTree
    in_specs: tuple[PartitionSpec, ...]
    input_output_aliases: tuple[tuple[int, int], ...]
    layout: PyTree = None  # of cuDNN's attention, 0 for BTNH and 1 for BNTH
    length: int = 1  # of a loop
    lhs_dilation: tuple[int, ...]
    limit_indices: tuple[int, ...]
    mesh: PyTree = None
    mode: lax.GatherScatterMode
    name: str = ""
    newly_manual_axes: frozenset[str]
    out_specs: tuple[PartitionSpec, ...]
    padding: tuple[tuple[int, int], ...] = ()
    padding_config: tuple[tuple[int, int, int], ...]
    permutation: tuple[int, ...]
    prevent_cse: bool = False
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers
    reverse: bool
    rhs_dilation: tuple[int, ...]
    sharding: NamedSharding
    slice_sizes: tuple[int, ...]
    start_indices: tuple[int, ...]
    strides: tuple[int, ...] = ()
    window_dilation: tuple[int, ...]
    window_dimensions: tuple[int, ...]
    window_strides: tuple[int, ...]

    def __init__(self, eqn: JaxprEqn) -> None:
        vars(self).update((k, value) for k, value in eqn.params.items() if value is not None)
        self.eqn = eqn

    @property
    def options(self) -> dict[str, PyTree]:
        """What to pass on where an equation like this is made."""
        return {name: self.eqn.params[name] for name in OPTIONS[self.eqn.primitive.name]}

    @property
    def factors(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Over which dimensions of each factor a matmul sums, and which both have in common."""
        if self.eqn.primitive.name == RAGGED:
            return self.ragged_dot_dimension_numbers.dot_dimension_numbers
        return self.dimension_numbers

    @property
    def reduced(self) -> tuple[int, ...] | None:
        """The dimensions that a reduction reduces; None for another equation."""
        is_reduction = self.eqn.primitive.name.startswith(("reduce_", "arg"))
        return self.eqn.params.get("axes") if is_reduction else None

    @property
    def takes_refs(self) -> bool:
        """Whether an operand is a `jax.new_ref`, which the equation may write to."""
        return any(hasattr(v.aval, "inner_aval") for v in self.eqn.invars)

    def parts(self, values: Iterable[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits what there is for each operand of a loop: of a scan, constants, carry and rows; of
        a `while`, constants of its test, those of its body, and carry."""
        if self.eqn.primitive.name == "scan":
            first, second = _compat.scan_counts(self.eqn)
        else:
            first, second = self.cond_nconsts, self.body_nconsts
        values = list(values)
        return values[:first], values[first : first + second], values[first + second :]


def with_params(eqn: JaxprEqn, **changed: object) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **changed})


def mapped_params(eqn: JaxprEqn, change: Callable[[str, PyTree], object]) -> JaxprEqn:
    """Returns an equation with other parameters, each from its name and its value."""
    return with_params(eqn, **{name: change(name, value) for name, value in eqn.params.items()})


def params_of(eqn: JaxprEqn) -> list[tuple[str, PyTree]]:
    """Returns the names and values of all parameters, in the order of names."""
    return sorted(eqn.params.items())


def with_sizes(eqn: JaxprEqn, change: Callable[[Sequence[int]], Sequence[int]]) -> JaxprEqn:
    """Returns an equation that takes other sizes of its operand, or whose result has others."""
    name = SIZED.get(eqn.primitive.name)
    return with_params(eqn, **{name: tuple(change(eqn.params[name]))} if name else {})


def running(eqn: JaxprEqn, jaxpr: Jaxpr) -> JaxprEqn:
    """Returns a call, remat or loop that runs another jaxpr, with the same constants."""
    name = next(name for name in _compat.INNER if name in eqn.params)
    inner, consts = _compat.opened(before := eqn.params[name])
    new = jaxpr if inner is before and not consts else ClosedJaxpr(jaxpr, consts)
    return with_params(eqn, **{name: new})


def jitted(jaxpr: Jaxpr, call: JaxprEqn) -> JaxprEqn:
    """Returns a `jax.jit` of `jaxpr`, on its own variables, with the name and context of a call."""
    (one,) = jax.make_jaxpr(jax.jit(lax.neg))(0.0).eqns
    ins, outs = jaxpr.invars, list(filter(is_var, jaxpr.outvars))
    # What there is for each operand and each result.
    counts = {"in": len(ins), "donated": len(ins), "out": len(outs)}
    kinds = {name: name.split("_")[0] for name in one.params}
    each = {name: one.params[name] * counts[kind] for name, kind in kinds.items() if kind in counts}
    eqn = with_params(running(one, jaxpr), name=Eqn(call).name, **each)
    return eqn.replace(invars=[*ins], outvars=outs, effects=jaxpr.effects, ctx=call.ctx)


def derivatives(eqn: JaxprEqn) -> list[_compat.OpenJaxpr]:
    """Returns the jaxprs of the derivative that a user wrote for an equation, with constants."""
    if eqn.params.get("jvp_jaxpr_fun"):
        return [_compat.jvp_rule(eqn)[0]]
    if not eqn.params.get("fwd_jaxpr_thunk"):
        return []
    forward, _, backward, _ = _compat.vjp_rules(eqn)
    return [forward, backward]


class Keys:
    """Numbers that are equal for equations that are alike: they compute the same.

    They may be in any scope and source line, their operands may be literals or not, and the
    literals in a `jax.checkpoint` may differ. If `exact`, they are from the same lines in the same
    scopes, and functions among their parameters count as equal only if they are one object.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.numbers: dict[Hashable, int] = {}
        self.jaxprs: dict[tuple[int, bool, bool], int] = {}
        self.alive: list[Any] = []  # what keys name by `id`, so that nothing else gets the same one
        self.in_rule = False

    def of(self, eqn: JaxprEqn) -> int:
        return self.number(self.key(eqn, is_checkpoint(eqn)))

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def key(self, eqn: JaxprEqn, loose: bool) -> Hashable:
        """Returns what an equation computes. If `loose`, literals in its jaxprs may differ."""
        if self.exact:
            others, left_out = (_compat.scope_of(eqn), eqn.source_info.traceback), frozenset()
        elif _compat.has_side_effects(eqn):
            return id(eqn)
        else:
            others, left_out = self.rules(eqn), _compat.DERIVATIVES
        params = [(k, self.param(v, loose)) for k, v in params_of(eqn) if k not in left_out]
        operands = tuple(v.aval for v in eqn.invars)
        outs = tuple(v.aval for v in eqn.outvars)
        return eqn.primitive, tuple(params), others, eqn.ctx, operands, outs

    def rules(self, eqn: JaxprEqn) -> Hashable:
        """Returns what the derivative computes that a user wrote for an equation."""
        if self.in_rule:  # a rule may call the function that it belongs to
            return ()
        self.in_rule = True
        try:
            return tuple(self.jaxpr(*rule) for rule in derivatives(eqn))
        except Exception:  # a rule that cannot be traced makes its call like no other
            return id(eqn)
        finally:
            self.in_rule = False

    def param(self, value: object, loose: bool) -> Hashable:
        jaxpr: Any = None
        jaxpr, consts = _compat.opened(value)
        if isinstance(jaxpr, Jaxpr):
            return self.jaxpr(jaxpr, consts, loose)
        if isinstance(value, tuple | list):
            return type(value), tuple(self.param(each, loose) for each in value)
        try:
            hash(value)
        except TypeError:
            return id(value)
        return type(value), value

    def jaxpr(self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], loose: bool = False) -> Hashable:
        self.alive += [jaxpr, *consts]
        known = id(jaxpr), loose, self.in_rule
        if known not in self.jaxprs:
            self.jaxprs[known] = self.number(self.code(jaxpr, loose))
        return self.jaxprs[known], tuple(map(id, consts))

    def code(self, jaxpr: Jaxpr, loose: bool) -> Hashable:
        numbers: dict[Var, int] = {}

        def names(atoms: Sequence[Atom], loose: bool = False) -> Hashable:
            return tuple(
                (v.aval, numbers.setdefault(v, len(numbers)))
                if is_var(v)
                else (v.aval if loose else same_as(v))
                for v in atoms
            )

        inputs = names((*jaxpr.constvars, *jaxpr.invars))
        eqns = [
            (self.key(e, loose and is_checkpoint(e)), names(e.invars, loose), names(e.outvars))
            for e in jaxpr.eqns
        ]
        return inputs, tuple(eqns), names(jaxpr.outvars)


def is_checkpoint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.REMAT


def same_as(atom: Atom) -> Hashable:
    """Returns what is equal for equal literals; of a variable, itself."""
    return atom if is_var(atom) else (atom.aval, np.asarray(atom.val).tobytes())


def nbytes(variables: Iterable[Atom]) -> int:
    return sum(t.size * t.dtype.itemsize for t in map(type_of, variables))


def unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def common_path(paths: Sequence[str]) -> str:
    """Returns one path for several, with a star at each level where they differ."""
    levels = zip(*(path.split("/")[::-1] for path in paths), strict=False)
    names = [found[0] if len({*found}) == 1 else "*" for found in levels]
    return "/".join(reversed(names))
