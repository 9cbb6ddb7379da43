"""Plans: which leaf is cut where, why not, and what they say about it."""

import re
import warnings

import flax.linen as nn
import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.models import OPTIMIZERS, gpt_params, mlp
from tests.reference import make_state
from zerojax._plan import planner as _planner


def specs(plan):
    return {leaf.path: leaf.spec for leaf in plan.leaves}


def params_plan(params, stage=3, **options):
    return zerojax.plan({"params": params}, stage=stage, **options)


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_first_divisible_dimension_is_cut():
    found = specs(params_plan({"a": shape(16, 24), "b": shape(3, 64), "c": shape(2, 2, 64)}))
    assert found == {
        "params/a": P("data"), "params/b": P(None, "data"), "params/c": P(None, None, "data"),
    }  # fmt: skip


def test_layer_dimension_of_a_stack_is_never_cut():
    stack = {"w": shape(8, 16, 16), "b": shape(8, 16), "gain": shape(8)}
    plan = params_plan({"blocks": stack, "w": shape(24, 16)}, min_shard_size=1)
    assert specs(plan) == {
        "params/blocks/b": P(None, "data"), "params/blocks/gain": P(),
        "params/blocks/w": P(None, "data"), "params/w": P("data"),
    }  # fmt: skip
    assert "layers" in {leaf.path: leaf.reason for leaf in plan.leaves}["params/blocks/gain"]


def test_of_loops_within_loops_neither_layer_dimension_is_cut():
    stack = {"w": shape(4, 8, 16, 24), "b": shape(4, 8, 24)}
    plan = params_plan({"groups": stack, "blocks": {"w": shape(6, 8, 24), "v": shape(6, 8, 16)}})
    assert [leaf.dim for leaf in plan.params] == [1, 1, 2, 2]
    only = params_plan({"groups": {"w": shape(4, 8, 15, 7), "b": shape(4, 8, 7)}})
    assert [leaf.dim for leaf in only.params] == [1, 1]  # nothing else divides


def test_plain_layer_is_not_mistaken_for_a_stack():
    square = {"kernel": shape(64, 64), "bias": shape(64)}
    assert specs(params_plan(square, min_shard_size=1)) == {
        "params/bias": P("data"), "params/kernel": P("data"),
    }  # fmt: skip


def test_stacked_pattern_decides():
    assert specs(params_plan({"w": shape(8, 16)}, stacked="w$"))["params/w"] == P(None, "data")


def test_flax_scan_metadata_tells_the_layer_dimension():
    box = nn.Partitioned(shape(8, 16, 16), names=("layers", None, None))
    assert specs(params_plan({"w": box}))["params/w/value"] == P(None, "data")


def test_reasons_say_what_to_do():
    plan = params_plan(
        {"odd": shape(50257, 3), "small": shape(4, 4), "scalar": shape(), "over": shape(64, 64)},
        overrides={"over": P()},
    )
    reasons = {leaf.path: leaf.reason for leaf in plan.leaves}
    assert "pad dimension 0 to 50264" in reasons["params/odd"]
    assert reasons["params/small"] == "smaller than min_shard_size=128"
    assert reasons["params/scalar"] == "scalar"
    assert reasons["params/over"] == "overrides="


def test_large_whole_leaves_are_warned_about():
    with pytest.warns(UserWarning, match=r"params/table .*pad dimension 0 to 50264.*Pad those"):
        params_plan({"table": shape(50257, 13)})


def test_override_decides_the_dimension():
    plan = params_plan({"w": shape(16, 16)}, overrides={"w$": P(None, "data")})
    assert specs(plan)["params/w"] == P(None, "data")


@pytest.mark.parametrize(
    ("spec", "error", "remedy"),
    [
        (P(None, "data"), ValueError, r"8 does not divide dimension 1 \(3\). Pad it to 8"),
        (P("model"), ValueError, r"no axis 'model'.*Name one of those"),
        (P(None, None, "data"), ValueError, r"more entries.*Drop the extra ones"),
        ("data", TypeError, r"map it to a jax.sharding.PartitionSpec"),
        (P(P.UNCONSTRAINED), ValueError, r"UNCONSTRAINED is no place. Put None"),
        (P("data", "data"), ValueError, r"one dimension.*Put 'data' there"),
    ],
)
def test_bad_override_names_path_and_remedy(spec, error, remedy):
    with pytest.raises(error, match=f"(?s)w.*{remedy}"):
        params_plan({"w": shape(16, 3)}, overrides={"w": spec})


@pytest.mark.parametrize("spec", [P("gpu"), P(("gpu", "host")), P("host", "gpu"), P(None, "host")])
def test_override_over_some_of_the_axes_is_refused(spec):
    mesh = jax.make_mesh((2, 4), ("host", "gpu"), axis_types=(AxisType.Auto,) * 2)
    remedy = r"puts params/w on P\(.*axes \('host', 'gpu'\).*PartitionSpec\(None\).*give axis="
    with pytest.raises(ValueError, match=remedy):
        params_plan({"w": shape(16, 8)}, mesh=mesh, axis=("host", "gpu"), overrides={"w": spec})


def test_bad_override_pattern():
    with pytest.raises(TypeError, match=r"must map path patterns to specs, got \[.*Pass a dict"):
        params_plan({"w": shape(16, 3)}, overrides=[("w", P())])
    with pytest.raises(ValueError, match=r"overrides=.*no regular expression.*Escape"):
        params_plan({"w": shape(16, 3)}, overrides={"*w": P()})


def test_patterns_that_match_nothing_are_mistakes():
    message = r"'weight', which no parameter matches. Name some; paths are such as"
    with pytest.raises(ValueError, match=message):
        params_plan({"w": shape(16, 3)}, overrides={"weight": P()})
    with pytest.raises(ValueError, match=message):
        params_plan({"w": shape(16, 3)}, stacked="weight")
    with pytest.raises(ValueError, match=r"stacked=.*no regular expression.*Escape"):
        params_plan({"w": shape(16, 3)}, stacked="*")


@pytest.mark.parametrize("size", [-1, "a", 1.5])
def test_min_shard_size_is_a_number_of_elements(size):
    with pytest.raises(ValueError, match=r"must be a number of elements.*Use 0"):
        params_plan({"w": shape(16, 3)}, min_shard_size=size)


@pytest.mark.parametrize("axis", [(), ("data", "data"), 3, (3,)])
def test_axes_are_different_and_some(axis):
    with pytest.raises(ValueError, match=r"must name one mesh axis.*leave axis= out"):
        params_plan({"w": shape(16, 3)}, axis=axis)


def test_class_whose_fields_jax_cannot_name():
    class State:
        def __init__(self, params, opt_state):
            self.params, self.opt_state = params, opt_state

    jax.tree_util.register_pytree_node(
        State, lambda s: ((s.params, s.opt_state), None), lambda _, parts: State(*parts)
    )
    with pytest.raises(ValueError, match=r"fields of State. Register it with.*register_dataclass"):
        zerojax.plan(State({"w": jnp.ones((16, 16))}, ()))


@pytest.mark.parametrize("stage", [-1, 4, "3", None, True, 1.5, 3.0])
def test_stage_outside_0_to_3(stage):
    with pytest.raises(ValueError, match=r"stage must be 0, 1, 2 or 3"):
        params_plan({"w": shape(16, 16)}, stage=stage)


def test_mesh_without_the_axis():
    with pytest.raises(ValueError, match=r"no axis 'model'.*Pass axis="):
        params_plan({"w": shape(16, 16)}, axis="model")
    two = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"no axis 'data'.*\('x', 'y'\).*Pass axis="):
        params_plan({"w": shape(16, 16)}, mesh=two)
    with pytest.raises(TypeError, match=r"Make one with jax.make_mesh"):
        params_plan({"w": shape(16, 16)}, mesh=8)


@pytest.mark.parametrize(
    ("devices", "what"),
    [([0] * 4, r"names 3 of its 4 devices again"), ([], r"'data': 0} has no devices")],
)
def test_mesh_of_no_or_the_same_devices(devices, what):
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]), ("data",))
    with pytest.raises(ValueError, match=rf"mesh.*{what}.*jax.make_mesh\(\(8,\)"):
        zerojax.shard_train_state({"params": {"w": jnp.ones((16, 16))}}, mesh=mesh)


def test_one_device_by_default_is_said_once(monkeypatch):
    state, one = {"params": {"w": jnp.ones((64, 16))}}, make_mesh(1)
    monkeypatch.setattr(jax, "devices", lambda: list(one.devices.flat))
    _planner._say_alone.cache_clear()
    zerojax.shard_train_state(state, stage=0)  # what warns here fails
    zerojax.shard_train_state(state, stage=3, mesh=one)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in (1, 3, 3):
            zerojax.shard_train_state(state, stage)
        assert "sharded: nothing" in str(zerojax.plan(state))
    (said,) = caught
    remedy = r"one cpu device, so a stage shards nothing.*'jax_num_cpu_devices', 8\).*mesh="
    assert said.category is UserWarning and re.search(remedy, str(said.message))


def test_optimizer_that_was_not_called():
    for refused in (
        lambda: params_plan({"w": shape(16, 16)}, tx=optax.adam),
        lambda: zerojax.train_step(lambda params, batch: 0.0, tx=optax.adam),
    ):
        with pytest.raises(TypeError, match=r"tx= is adam.*call it, as in optax.adam"):
            refused()


def test_precision_that_is_none():
    with pytest.raises(TypeError, match=r"precision must be.*got 'bfloat16'. Pass for example"):
        params_plan({"w": shape(16, 16)}, precision="bfloat16")


def test_explicit_mesh_is_explained():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"Explicit.*axis_types=\(jax.sharding.AxisType.Auto,\)"):
        params_plan({"w": shape(16, 16)}, mesh=mesh)


def test_two_zero_axes_are_one():
    axes = ("host", "gpu")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    plan = params_plan({"w": shape(16, 30)}, mesh=mesh, axis=axes)
    assert plan.size == 8 and specs(plan)["params/w"] == P(axes)


def test_existing_axes_are_kept():
    axes = ("data", "tensor")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), axes, axis_types=(AxisType.Auto,) * 2)
    params = {
        "boxed": nn.Partitioned(shape(16, 16), names=("tensor", None)),
        "logical": nn.LogicallyPartitioned(shape(16, 16), names=("embed", "mlp")),
        "placed": jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P(None, "tensor"))),
    }
    found = specs(params_plan(params, mesh=mesh))
    assert found["params/boxed/value"] == P("tensor", "data")
    assert found["params/logical/value"] == P("data")
    assert found["params/placed"] == P("data", "tensor")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_cut_by_sharding_types(optimizer):
    tx = OPTIMIZERS[optimizer]()
    params = jax.eval_shape(gpt_params)
    plan = zerojax.plan((params, jax.eval_shape(tx.init, params)), stage=1, tx=tx)
    whole = [leaf for leaf in plan.leaves if leaf.kind == "opt_state" and not any(leaf.spec)]
    large = [leaf.path for leaf in whole if np.prod(leaf.shape) >= 128]
    # A factored moment whose own dimensions are not the cut one has nothing to be cut along.
    assert all("v_row" in path or "v_col" in path for path in large), large
    assert optimizer == "adafactor" or not large


def ravelled(inner):
    """As shampoo- and SOAP-like optimizers: one vector for all parameters."""

    def update(grads, state, params=None):
        flat, unravel = ravel_pytree(grads)
        updates, state = inner.update(flat, state)
        return unravel(updates), state

    return optax.GradientTransformation(lambda p: inner.init(ravel_pytree(p)[0]), update)


@pytest.mark.parametrize("wrapper", [optax.flatten, ravelled])
def test_optimizers_that_reshape_parameters(wrapper, mesh):
    params = {"conv": jnp.ones((3, 8, 16)), "w": jnp.ones((16, 8))}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.mean(p["conv"] ** 2)
    tx, x = wrapper(optax.adam(0.1)), np.ones((8, 16), np.float32)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    wanted = state.apply_gradients(grads=jax.grad(loss)(params, x))
    plan = zerojax.plan(state, stage=3, mesh=mesh)
    refused = "tx.init does what sharding types refuse (ShardingTypeError)"
    moments = [leaf for leaf in plan.leaves if leaf.kind == "opt_state" and leaf.shape]
    assert len(moments) == 2 and all(refused in leaf.reason for leaf in moments)
    assert refused in str(plan)
    state, _ = zerojax.train_step(loss)(plan.place(state), x)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert state.opt_state[0].mu.sharding.spec == P("data")


def test_errors_of_the_optimizer_are_its_own():
    def init(params):
        raise ValueError("lr must be positive")

    wrong = optax.GradientTransformation(init, optax.sgd(0.1).update)
    with pytest.raises(ValueError, match="lr must be positive"):
        zerojax.plan(({"w": jnp.ones(8)}, ()), stage=1, tx=wrong)


def test_optimizer_that_wants_concrete_values_falls_back_to_shapes():
    def init(params):
        assert float(jnp.sum(params["w"])) >= 0  # cannot be traced
        return {"moments": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), int)}

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    params = {"w": jnp.ones((16, 16))}
    plan = zerojax.plan((params, tx.init(params)), stage=1, tx=tx)
    assert specs(plan)["1/moments/w"] == P("data") and specs(plan)["1/count"] == P()


def test_stage_decides_only_where_specs_apply():
    tx = optax.adam(1e-3)
    params = {"w": shape(16, 16)}
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    at = {stage: specs(zerojax.plan(state, stage=stage, tx=tx)) for stage in range(4)}
    moments = "opt_state/0/mu/w"
    assert [at[s]["params/w"] for s in range(4)] == [P(), P(), P(), P("data")]
    assert [at[s][moments] for s in range(4)] == [P(), P("data"), P("data"), P("data")]


def test_other_fields_follow_the_parameters_they_copy():
    class State(TrainState):
        ema_params: dict
        batch_stats: dict

    params = {"w": jnp.ones((16, 16))}
    stats = {"mean": jnp.zeros(512)}
    state = State.create(
        apply_fn=None, params=params, tx=optax.sgd(1.0), ema_params=params, batch_stats=stats
    )
    found = specs(zerojax.plan(state, stage=1))
    assert found["ema_params/w"] == P("data") and found["batch_stats/mean"] == P()


def test_plan_prints_leaves_bytes_and_totals():
    made = mlp(False)
    text = str(zerojax.plan(make_state(made, optax.adam(1e-3)), stage=3, min_shard_size=1))
    assert "ZeRO stage 3 over data=8 (cpu); sharded: opt_state, grads, params" in text
    row = next(line for line in text.splitlines() if line.startswith("params/in/w"))
    assert row.split() == ["params/in/w", "float32[24,", "64]", "(data)", "6.0", "KiB", "768", "B"]
    assert re.search(r"parameters +8.3 KiB +1.0 KiB", text)
    assert re.search(r"optimizer state +16.6 KiB +2.1 KiB", text)
    title = "ZeRO stage 3 over data=8 (cpu); sharded: opt_state, grads, params"
    assert repr(zerojax.plan(make_state(made, optax.adam(1e-3)))) == f"<Plan of 14 leaves: {title}>"
    html = zerojax.plan(make_state(made, optax.adam(1e-3)))._repr_html_()
    assert html.count("<tr>") == 1 + 14 + 4 and "params/in/w" in html


def test_plan_is_immutable_hashable_and_equal_by_value():
    one, two = params_plan({"w": shape(16, 16)}), params_plan({"w": shape(16, 16)})
    assert one == two and hash(one) == hash(two)
    assert one != params_plan({"w": shape(16, 16)}, stage=2)
    with pytest.raises(AttributeError):
        one.stage = 2
    make = lambda: make_state(mlp(False), optax.adam(1e-3))  # static fields made anew each time
    assert zerojax.plan(make()) == zerojax.plan(make)


def test_optimizer_and_params_that_do_not_match():
    params = {"w": jnp.ones((16, 16))}
    tx = optax.adam(1e-3)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/v.*Make it anew: opt_state = tx.init"):
        zerojax.plan((params, tx.init({"v": params["w"]})), tx=tx)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/w has shape \(8,\).*tx.init"):
        zerojax.plan((params, tx.init({"w": jnp.ones(8)})), tx=tx)


def test_state_without_parameters():
    with pytest.raises(ValueError, match=r"no parameters.*Pass a flax TrainState"):
        zerojax.plan({"weights": shape(16, 16)})
    for empty in (None, {}, {"params": {}}, {"params": {"empty": ()}}):
        with pytest.raises(ValueError, match=r"no parameters.*Pass a flax TrainState"):
            zerojax.shard_train_state(empty)
    with pytest.raises(TypeError, match=r"params/name is the string 'x'.*static field"):
        params_plan({"name": "x"})
    with pytest.raises(TypeError, match=r"params/f is a builtin.*static field"):
        params_plan({"f": len})


def test_abstract_state_carries_shardings():
    plan = zerojax.plan(make_state(mlp(False), optax.adam(1e-3)), stage=3)
    abstract = plan.abstract()
    assert isinstance(abstract, TrainState)
    assert abstract.params["in"]["w"].sharding.spec == P("data")
    step = zerojax.train_step(mlp(False).loss)
    compiled = step.lower(abstract, mlp(False).batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0


LEAVES = st.tuples(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 24]), max_size=4),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
)
TREES = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)) | st.none(),
    lambda kids: (
        st.dictionaries(st.sampled_from("abcd"), kids, max_size=3) | st.lists(kids, max_size=3)
    ),
    max_leaves=6,
)


def build(tree):
    match tree:
        case ("leaf", (dims, dtype)):
            return np.arange(np.prod(dims, dtype=int)).reshape(dims).astype(jnp.dtype(dtype))
        case dict():
            return {k: build(v) for k, v in tree.items()}
        case list():
            return [build(v) for v in tree]
    return None


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(tree=TREES, stage=st.integers(0, 3), devices=st.sampled_from([1, 2, 8]))
def test_placing_any_tree_keeps_values_and_follows_the_plan(tree, stage, devices):
    state = {"params": build(tree), "opt_state": ()}
    hypothesis.assume(jax.tree.leaves(state))
    plan = zerojax.plan(state, stage=stage, mesh=make_mesh(devices), min_shard_size=1)
    placed = plan.place(state)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for leaf, before, after in zip(
        plan.leaves, jax.tree.leaves(state), jax.tree.leaves(placed), strict=True
    ):
        np.testing.assert_array_equal(before, np.asarray(after))
        assert after.dtype == before.dtype and after.sharding.spec == leaf.spec
        shard = after.addressable_shards[0].data
        assert shard.nbytes == leaf.bytes_per_device(plan.mesh)
        divides = any(d and d % devices == 0 for d in before.shape[int(leaf.stacked) :])
        cut = stage == 3 and devices > 1 and divides
        assert (leaf.spec != P()) == cut
        assert (leaf.reason is None) == (divides and before.ndim > 0)
    # numpy's own copy of the parameters comes back whole
    back = zerojax.gather_params(placed)
    jax.tree.map(np.testing.assert_array_equal, back, state["params"])


@flax.struct.dataclass
class Odd:
    params: dict
    opt_state: tuple
    key: jax.Array
    nothing: None = None
    step: int = 0


def test_keys_scalars_nones_and_tied_leaves_are_placed():
    shared = jnp.ones((16, 16))
    state = Odd({"a": shared, "b": shared, "empty": {}}, (), jax.random.key(0), step=7)
    plan = zerojax.plan(state, stage=3)
    placed = plan.place(state)
    assert placed.nothing is None and placed.step == 7 and placed.step.dtype == jnp.int32
    np.testing.assert_array_equal(
        jax.random.key_data(placed.key), jax.random.key_data(jax.random.key(0))
    )
    consume = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    consume(placed)  # tied leaves do not share a buffer, or donation would fail
    assert not shared.is_deleted()


def test_place_refuses_another_tree_and_moves_nothing():
    plan = params_plan({"w": shape(16, 16)})
    with pytest.raises(TypeError, match=r"leaf params/w is the shape.*function that makes"):
        plan.place({"params": {"w": shape(16, 16)}})
    with pytest.raises(ValueError, match=r"params/w is float32\[8, 16\].*Make a plan"):
        plan.place({"params": {"w": jnp.ones((8, 16))}})
    with pytest.raises(ValueError, match=r"params/v is not in the plan.*Make a plan"):
        plan.place({"params": {"w": jnp.ones((16, 16)), "v": jnp.ones(3)}})
    with pytest.raises(ValueError, match=r"params/w is missing.*Make a plan"):
        plan.place({"params": {}, "opt_state": jnp.ones(1)})
