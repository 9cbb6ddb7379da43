"""Messages about a plan: what was passed, and the remedy."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.linear import BATCH, loss, made
from tests.support.shapes import params_plan, shape

W = {"w": shape(16, 3)}
PAIR = ({"w": np.ones((64, 16), "f")}, ())
ADAM = optax.adam(1e-3)
BF16 = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
MOMENTS = zerojax.Precision(moments="bfloat16")
LEVELS = zerojax.mesh(host=2, gpu=2, tensor=2)
DEVICES = np.array(jax.devices())
AUTO = r"axis_types=\(jax.sharding.AxisType.Auto,\)"


def override(spec, params=W, **options):
    return lambda: params_plan(params, overrides={"w": spec}, **options)


def on_levels(spec):
    wide = {"w": shape(16, 8)}
    return override(spec, wide, mesh=LEVELS, axis=("host", "gpu"))


def options(**chosen):
    return lambda: params_plan(W, **chosen)


def precision(**chosen):
    return lambda: zerojax.Precision(**chosen)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (override(P("model")), r"w on .*no axis 'model'.*Name one of those"),
        (override(P(None, None, "data")), r"w .*more entries.*Drop the extra ones"),
        (override("data"), r"map it to a jax.sharding.PartitionSpec"),
        (override(P(P.UNCONSTRAINED)), r"w on .*UNCONSTRAINED says nothing .*Put None"),
        (override(P("data", "data")), r"w on .*one dimension.*Put 'data' there"),
        (
            override(P(None, "data"), pad=False),
            r"w .*8 does not divide dimension 1 \(3\). Resize it to 8 or override another",
        ),
        # JAX shards over the user's own axes, and does not pad.
        (
            override(P("gpu", "tensor"), mesh=LEVELS, axis="gpu"),
            r"2 does not divide dimension 1 \(3\)",
        ),
        (on_levels(P("host", "gpu")), r"w on P\(.*axes \('gpu', 'host'\).*PartitionSpec\(None\)"),
        (on_levels(P(("gpu", "tensor"))), r"w on P\(.*axes \('gpu', 'host'\).*PartitionSpec\(Non"),
        (
            lambda: params_plan({"params": W, "_overwrite_with_gradient": {"dense": W}}),
            r"_overwrite_with_gradient/dense/w .*sum them over the devices. Take their maximum",
        ),
        (options(overrides=[("w", P())]), r"must map path patterns to specs, got \[.*Pass a dict"),
        (options(overrides={"*w": P()}), r"overrides=.*not a regular expression.*Escape"),
        (options(overrides={"v": P()}), r"'v', which matches no parameter. Paths .* (params/)?w\."),
        (options(overrides={"": P()}), r"overrides= has .* '', which is empty .*pass '\.\*'"),
        (options(stacked="w|"), r"stacked= has .*'w\|', which is empty or has an empty altern"),
        (options(stacked="v"), r"'v', which matches no parameter. Paths are such as (params/)?w\."),
        (options(stacked="*"), r"stacked=.*not a regular expression.*Escape"),
        (options(stacked=("w",)), r"stacked=\('w',\) is not a path pattern. Pass one regular"),
        (options(pad="no"), r"pad='no' must be True or False"),
        (options(min_shard_size=-1), r"must be a number of elements.*Use 0"),
        (options(min_shard_size=1.5), r"must be a number of elements.*Use 0"),
        *[
            (options(stage=stage), r"stage must be 0, 1, 2 or 3")
            for stage in (-1, 4, "3", None, True, 3.0)
        ],
    ],
)
def test_what_is_sharded_how(call, remedy):
    with pytest.raises((ValueError, TypeError), match=f"(?s){remedy}"):
        call()


@pytest.mark.parametrize("typo", ["dense/kernal", "params/Dense_0/kernl", "Densee", "^kernels$"])
def test_patterns_with_a_typo_are_told_what_they_mean(typo):
    params = {"Dense_0": {"kernel": shape(16, 3)}, "Conv_0": {"bias": shape(16)}}
    with pytest.raises(ValueError, match=r"matches no parameter. Did you mean params/Dense_0/ker"):
        params_plan(params, overrides={typo: P()})


def mesh(names=("data",), devices=DEVICES, kind=AxisType.Auto):
    return Mesh(devices, names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize(
    ("chosen", "remedy"),
    [
        *[
            ({"axis": axis}, r"must name one axis of the mesh.*leave axis= out")
            for axis in ((), ("data", "data"), 3, (3,))
        ],
        ({"axis": "model"}, r"axis='model' must name one axis.*\('data',\). Pass one of them"),
        (
            {"mesh": mesh(("x", "y"), DEVICES.reshape(2, 4))},
            r"axes \('x', 'y'\) and none .*'data'.*: pass axis='x', axis='y' or both, axis=\('x', "
            r"'y'\).*groups=dict.fromkeys\(\('params', 'grads', 'opt_state'\), 'y'\)",
        ),
        *[
            ({"mesh": kind(DEVICES[:4])}, rf"\(\(4,\), \('data',\), {AUTO}, devices=devices\)")
            for kind in (np.array, list, tuple)
        ],
        ({"mesh": 4}, rf"Make one with jax.make_mesh\(\(4,\), \('data',\), {AUTO}\)"),
        ({"mesh": "data"}, rf"Make one with jax.make_mesh\(\(8,\), \('data',\), {AUTO}\)"),
        ({"mesh": mesh(devices=DEVICES[[0] * 4])}, r"more than once\..*jax.make_mesh\(\(8,\)"),
        ({"mesh": mesh(devices=DEVICES[:0])}, r"'data': 0} has no devices.*jax.make_mesh\(\(8,\)"),
        (
            {"mesh": mesh(kind=AxisType.Manual)},
            r"Manual ones are of one .*outside of the shard_map",
        ),
    ],
)
def test_meshes_and_their_axes(chosen, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        params_plan(W, **chosen)


def refuses(_):
    raise ValueError("lr must be positive")


def of_optimizer(params, opt_state, tx=ADAM):
    return lambda: zerojax.plan((params, opt_state), tx=tx)


w = shape(16, 16)
STACKED = jax.tree.map(
    lambda x: shape(4, *x.shape, dtype=x.dtype), ({"w": w}, jax.eval_shape(ADAM.init, {"w": w}))
)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (options(tx=optax.adam), r"tx= is adam.*call it, as in optax.adam"),
        (of_optimizer(*PAIR, optax.GradientTransformation(refuses, None)), "lr must be positive"),
        (
            of_optimizer({"w": w}, jax.eval_shape(ADAM.init, {"v": w})),
            r"opt_state/0/mu/v is only in the state\. Make it again: opt_state = tx.init",
        ),
        (
            of_optimizer({"w": w}, optax.EmptyState()),
            r"opt_state/0/count is missing\. Make it again: opt_state = tx.init",
        ),
        (
            of_optimizer({"w": w}, jax.eval_shape(ADAM.init, {"w": shape(8)})),
            r"opt_state/0/mu/w has shape \(8,\), but tx.init\(params\) makes \(16, 16\)",
        ),
        (of_optimizer(*STACKED), r"count has shape \(4,\).*unreplicate\(state\)"),
    ],
)
def test_optimizers(call, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        call()


def stepped(placed, **asked):
    """A step that is told of another precision than its state is placed with."""
    step = zerojax.train_step(loss, precision=zerojax.Precision(**asked))
    return lambda: step(zerojax.shard_train_state(made(), precision=placed), BATCH)


NO_OPTIMIZER = (
    r"tuple does not carry\. .*zerojax.manual.master_weights\(tx\)."
    r"*zerojax.manual.narrow_moments\(tx"
)
NO_PRECISION = r"precision must be a zerojax.Precision, got 'bfloat16'. Pass for example"
AT_REST = r"how the state is stored.*placed without it. Place it with.*precision=\.\.\."
ONLY = r"moments can be stored only in bfloat16.*Pass 'bfloat16' or 'int8', or leave moments= out"


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (precision(compute="int8"), r"compute='int8'\): not a float dtype. Use one such as"),
        (
            precision(moments="int4"),
            r"moments='int4'\): not a float dtype. Use one such as.* 'int8'",
        ),
        (precision(param="bfloat16", master="Split"), r"master='Split'\).*'split'"),
        (precision(reduce="half-ish"), r"'half-ish'\) is neither a float dtype nor a quant"),
        (precision(master="float32"), r"Pass param=\.\.\. as well"),
        (
            precision(param="float8_e4m3fn"),
            r"16 bits or more.*Pass param='bfloat16', and gather='float8_e4m3fn' to send them",
        ),
        (precision(moments="float16"), rf"moments='float16': {ONLY}"),
        (lambda: zerojax.plan(PAIR, precision=BF16), NO_OPTIMIZER),
        *[
            (call, NO_PRECISION)
            for call in (
                lambda: zerojax.train_step(loss, precision="bfloat16"),
                lambda: zerojax.eval_step(loss, precision="bfloat16"),
                lambda: zerojax.plan(PAIR, precision="bfloat16"),
            )
        ],
        (stepped(None, param="bfloat16", master="float32"), AT_REST),
        (stepped(BF16, compute="float16"), r"Leave precision= out of the step, or place"),
        (
            lambda: zerojax.manual.master_weights(ADAM).update(PAIR[0], None),
            r"call update\(grads, state, params\)",
        ),
    ],
)
def test_precision(call, remedy):
    with pytest.raises((ValueError, TypeError), match=f"(?s){remedy}"):
        call()


def test_a_pair_whose_optimizer_stores_as_the_precision_says_is_planned():
    for wrapped, asked in (
        (zerojax.manual.master_weights(ADAM), BF16),
        (zerojax.manual.narrow_moments(ADAM), MOMENTS),
    ):
        params = jax.tree.map(lambda x: shape(*x.shape, dtype=asked.param or "float32"), PAIR[0])
        opt_state = jax.eval_shape(wrapped.init, params)
        plan = zerojax.plan((params, opt_state), tx=wrapped, precision=asked)
        assert plan.precision == asked


ONES = np.ones((16, 16), "f")
SQUARE = {"params": {"w": ONES}}
PLAN = zerojax.plan(SQUARE)
PADS = zerojax.plan(({"w": shape(257, 5)}, ()), mesh=make_mesh(6))


def place(tree):
    return lambda: PLAN.place(tree)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (place(jax.eval_shape(lambda: SQUARE)), r"params/w is the shape.*function that makes"),
        (place({"params": {"w": ONES[:8]}}), r"w is float32\[8, 16\].*Make a plan"),
        (place({"params": {"w": ONES, "v": ONES}}), r"params/v is not in the plan.*Make a plan"),
        (place({"params": {}, "opt_state": ONES}), r"params/w is missing.*Make a plan"),
        (lambda: PADS.place(PADS.abstract()), r"has no values to place"),
        (lambda: zerojax.unpad(PADS.place(PAIR)), r"0/w is float32\[64, 16\].*Make a plan"),
        (lambda: zerojax.unpad(PAIR), r"tuple does not carry.*zerojax.unpad\(state, plan\)"),
        (lambda: zerojax.gather_params({"v": ONES}, PADS), r"state leaf params/w is missing"),
        (lambda: PLAN.show("params/x"), r"no leaf 'params/x' .*. Did you mean params/w"),
        (lambda: PLAN.show("kernel"), r"no leaf 'kernel'.*. Paths are such as params/w"),
    ],
)
def test_states_that_a_plan_is_not_of(call, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        call()
