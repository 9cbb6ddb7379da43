"""Meshes of Explicit axes, as `jax.make_mesh` makes them: types, numbers and programs."""

import contextlib
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.step import tensor
from tests.support.families import BATCH, FAMILIES
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step
from zerojax.tools._forecast.mfu import needed_flops

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = np.linspace(-1, 1, 16 * 60, dtype="f").reshape(16, 60)


def retyped(mesh, *types):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def types(tree):
    return [str(jax.typeof(leaf)).lstrip("~") for leaf in jax.tree.leaves(tree)]


def make():
    params = {f"b{n}": {"w": np.ones((60, 60), "f") / 60} for n in range(2)}
    params["v"] = np.ones(64, "f")
    return train_state(params, optax.contrib.muon(1e-2))


def loss(params, x):
    for n in range(2):
        x = jax.checkpoint(lambda x, p: x + jnp.tanh(x @ p["w"]))(x, params[f"b{n}"])
    return jnp.mean(x**2) * jnp.mean(params["v"])


def trained(state, loss, batch, **options):
    """The state and metrics after two steps, and how many operations of each kind the program has:
    of one program, whose inputs are donated, and which keeps types."""
    before, step = types(state), train_step(loss, **options)
    text = step.lower(state, batch).compile().as_text()
    for _ in range(2):
        old, (state, metrics) = state, step(state, batch)
        assert types(state) == before
    assert jax.tree.leaves(old.params)[0].is_deleted() and step._cache_size() == 1
    return state, metrics, Counter(re.findall(r" = \S+ ([\w-]+)\(", text))


@pytest.mark.parametrize(("stage", "is_set"), [(1, True), (2, False), (3, False), (3, True)])
def test_a_state_keeps_its_types_and_a_step_its_program(stage, is_set):
    """60 rests padded as 64 at stage 3. Muon's update does not run on Explicit axes."""
    results = []
    for kind in (AUTO, EXPLICIT):
        mesh = retyped(make_mesh(), kind)
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            state = zerojax.shard_train_state(make, stage=stage, mesh=mesh, min_shard_size=1)
            state, metrics, ops = trained(state, loss, zerojax.shard_batch(ROWS, like=state))
            evaluated = zerojax.eval_step(loss)(state, ROWS)["loss"]
            results.append((metrics, zerojax.gather_params(state), evaluated, ops))
        in_type = "@data" in str(jax.typeof(state.params["b0"]["w"]))
        assert in_type == (kind == EXPLICIT and stage == 3)
        assert state.params["v"].sharding.mesh.axis_types == (kind,)
    assert results[0][-1] == results[1][-1], "the programs have other operations"
    assert_close(results[0][:-1], results[1][:-1], 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_one_program(name):
    """Before XLA: but for constraints, all operations are those of Auto axes."""
    family, stage = FAMILIES[name](), 1 + [*FAMILIES].index(name) % 3
    auto = family.mesh or make_mesh(2)
    made = jax.eval_shape(family.make)

    def ops(mesh):
        plan = zerojax.plan(made, stage=stage, mesh=mesh)
        lowered = zerojax.train_step(family.loss, plan=plan).lower(plan.abstract(), BATCH)
        counts = Counter(re.findall(r" = \"?([a-z]+\.\w+)", lowered.as_text()))
        return {op: n for op, n in counts.items() if "sharding_constraint" not in op}

    assert ops(retyped(auto, *[EXPLICIT] * len(auto.axis_names))) == ops(auto)


def test_a_loop_by_hand_and_a_checkpoint_keep_types(tmp_path):
    """`value_and_grad`, `plan.scatter` and `plan.constrain` in a user's own `jax.jit`."""
    results = []
    for kind in (AUTO, EXPLICIT):
        state = zerojax.shard_train_state(make, stage=3, mesh=retyped(make_mesh(), kind))
        plan, before = state.tx.plan, types(state)

        @jax.jit
        def step(state, x, plan=plan):
            value, grads = zerojax.value_and_grad(loss, plan)(state.params, x)
            new = plan.scatter(state).apply_gradients(grads=plan.logical_grads(grads))
            return plan.constrain(new, into=state), value, grads

        state, value, grads = step(state, ROWS)
        assert types(state) == before
        assert types(grads) == types(state.params)
        zerojax.save(tmp_path / kind.name, state)
        restored = zerojax.restore(tmp_path / kind.name, like=state)
        assert types(restored) == before
        shapes = jax.eval_shape(lambda state=state: state)
        assert (
            zerojax.restore(tmp_path / kind.name, like=shapes).params["v"].sharding.num_devices == 1
        )
        results.append((value, zerojax.gather_params(restored)))
    assert_close(*results, 0)


def test_a_batch_and_keys_of_explicit_axes():
    """Their types come from arrays on another mesh, of the same devices."""
    mesh = retyped(make_mesh(), EXPLICIT)
    placed = jax.device_put(ROWS, NamedSharding(mesh, P("data")))
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
    state = zerojax.shard_train_state(make, stage=3)
    step = zerojax.train_step(lambda p, x, key: loss(p, x + jax.random.normal(key, (60,))))
    expected = step(jax.tree.map(jnp.copy, state), ROWS, jax.random.key(0))[1]
    assert_close(step(state, placed, key)[1], expected, 0)


# -- an axis of the user's own

SETTINGS = {"explicit": (EXPLICIT,) * 2, "mixed": (AUTO, EXPLICIT), "zero's": (EXPLICIT, AUTO)}


@pytest.mark.parametrize(("kind", "stage"), [("explicit", 1), ("mixed", 3), ("zero's", 3)])
def test_an_axis_of_the_users(kind, stage):
    results = []
    for mesh in (tensor.cpu_mesh(), retyped(tensor.cpu_mesh(), *SETTINGS[kind])):
        batch = jax.device_put(tensor.BATCH, NamedSharding(mesh, P(None, "data")))
        state, metrics, ops = trained(tensor.placed(mesh, stage), tensor.scanned, batch)
        results.append(((metrics, zerojax.gather_params(state)), ops))
    assert results[0][1] == results[1][1]
    assert_close(results[0][0], results[1][0], 0)


def scaled(params, x):
    return jnp.mean(((x * params["scale"]) @ params["w"]) ** 2)


def beside(kind, spec, tx):
    """A mesh, and a state on it with a matrix that the user has placed."""
    mesh = retyped(tensor.cpu_mesh(), kind, kind)
    w = np.random.default_rng(0).normal(size=(64, 64)).astype("f")
    params = {"w": jax.device_put(w, NamedSharding(mesh, spec)), "scale": np.ones(64, "f")}
    return mesh, train_state(params, tx)


PLACED = [P(None, "tensor"), P("tensor", None)]  # over which shards end within a block, or not


@pytest.mark.parametrize("spec", PLACED)
def test_moments_of_8_bits_beside_an_axis_of_the_users(spec, tmp_path):
    """Trained before it is placed, and restored from a state with moments of float32."""
    eight, results = zerojax.Precision(moments="int8"), []
    for kind in (AUTO, EXPLICIT):
        mesh, state = beside(kind, spec, optax.adam(1e-2))
        state = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        narrow = zerojax.shard_train_state(state, mesh=mesh, precision=eight)
        wide = zerojax.shard_train_state(beside(kind, spec, optax.adam(1e-2))[1], mesh=mesh)
        zerojax.save(tmp_path / kind.name, wide)
        restored = zerojax.restore(tmp_path / kind.name, like=narrow)
        assert types(restored) == types(narrow)
        step = zerojax.train_step(scaled)
        for state in (narrow, restored):
            state, metrics = step(state, np.ones((8, 64), "f"))
            codes = state.opt_state.inner[0].mu["w"]
            results.append((metrics["loss"], codes.addressable_shards[0].data, codes))
    assert_close(results[:2], results[2:], 0)


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("codes", ["int8", "nf4"])
@pytest.mark.parametrize("spec", PLACED)
def test_weights_in_codes_beside_an_axis_of_the_users(spec, codes, is_set):
    labels, results = {"w": "frozen", "scale": "trained"}, []
    kinds = {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}
    for kind in (AUTO, EXPLICIT):
        mesh, state = beside(kind, spec, optax.multi_transform(kinds, labels))
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            state = zerojax.shard_train_state(zerojax.quantize(state, codes), mesh=mesh)
            state, metrics = zerojax.train_step(scaled)(state, np.ones((8, 64), "f"))
            weights = zerojax.manual.dequantize(zerojax.unpad(state).params)["w"]
        rows = state.params["w"].rows
        assert "tensor" in str(rows.sharding.spec)
        results.append((metrics["loss"], rows.addressable_shards[0].data, weights))
    assert ("@" in types(weights)[0]) == (kind == EXPLICIT)
    assert_close(*results, 0)


def explicit_loss(params, x):
    """Runs under no mesh but one of Explicit axes, and names both."""
    x = jnp.eye(tensor.DIM).at[jnp.argsort(x)].get(out_sharding=P("data", None, None)).sum(1)

    def layer(x, p):
        assert jax.typeof(p["up"]).sharding.spec == P(None, "tensor")
        inner = jnp.einsum("ij,jk->ik", x, p["up"], out_sharding=P("data", "tensor"))
        return x + jnp.dot(jnp.tanh(inner), p["down"], out_sharding=P("data", None)), None

    x = jax.lax.scan(jax.checkpoint(layer), x, params)[0]
    return jnp.mean(jax.sharding.reshard(x, P("data", "tensor")).reshape(-1, 2, tensor.DIM) ** 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_written_for_explicit_axes(stage):
    """As it is, without zerojax, and with it: gathers, one layer at a time, go over `data`."""
    mesh = retyped(tensor.cpu_mesh(), EXPLICIT, EXPLICIT)
    state = tensor.placed(mesh, stage)
    batch = jax.device_put(tensor.BATCH, NamedSharding(mesh, P("data")))
    full = {
        k: jax.device_put(v, NamedSharding(mesh, tensor.SPECS[k]))
        for k, v in zerojax.gather_params(state).items()
    }
    with jax.set_mesh(mesh):
        value, grads = jax.jit(jax.value_and_grad(explicit_loss))(full, batch)
    plan = state.tx.plan
    graded = zerojax.value_and_grad(explicit_loss, plan)
    assert_close(graded(state.params, batch), (value, grads), 1e-6)
    step = zerojax.train_step(explicit_loss)
    assert zerojax.verify(step, state, tensor.BATCH)
    flops = needed_flops(explicit_loss, plan, batch, None, ())
    assert flops == needed_flops(tensor.scanned, plan, batch, None, ())
    sent = {1: {"reduce-scatter": 1, "all-gather": 1}, 3: {"reduce-scatter": 1, "all-gather": 2}}
    expected = {kind: times * tensor.SENT for kind, times in sent[stage].items()}
    assert tensor.weights_sent(zerojax.audit(step, state, batch)) == expected
    text = step.lower(state, batch).as_text()
    for width in (tensor.INNER, tensor.DIM):  # of `inner`, and of what is resharded last
        assert f'<@mesh, [{{}}, {{"tensor"}}]> : tensor<16x{width}xf32>' in text


def resharding_loss(params, x):
    """Names `tensor` only for weights: a stack of layers, and one layer's."""

    def layer(x, p):
        down = jax.sharding.reshard(p["down"], P("tensor", None))
        return x + jnp.matmul(jnp.tanh(x @ p["up"]), down, out_sharding=P(None, None)), None

    params = params | {"up": jax.sharding.reshard(params["up"], P(None, None, "tensor"))}
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_names_an_axis_for_weights_alone(stage):
    """They rest as the plan says, and the loss gets them sharded over that axis too."""
    mesh = retyped(tensor.cpu_mesh(), EXPLICIT, EXPLICIT)
    state = zerojax.shard_train_state(tensor.make_state, stage=stage, mesh=mesh)
    step = zerojax.train_step(resharding_loss)
    assert zerojax.verify(step, state, tensor.BATCH)
    text = step.lower(state, tensor.BATCH).compile().as_text()
    products = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    assert products and not any(str(tensor.INNER) in product for product in products), products


TABLE = np.random.default_rng(1).normal(size=(512, tensor.DIM)).astype("f")
TOKENS = np.arange(16, dtype=np.int32) * 37 % 512


def looked_up(asks, params, tokens):
    """Of a table whose columns are asked for over `tensor`, or not, some rows."""
    table, spec = params["table"], P("data", "tensor")
    if asks:
        table = jax.sharding.reshard(table, P(None, "tensor"))
    return jnp.mean(jnp.sin(table.at[tokens].get(out_sharding=spec)) ** 2)


@pytest.mark.parametrize("asks", [True, False])
def test_a_table_that_a_loss_asks_for_over_an_axis_is_gathered(asks):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    plan = zerojax.plan({"params": {"table": TABLE}}, stage=3, mesh=mesh)
    params = plan.place({"params": {"table": TABLE}})["params"]
    graded = jax.jit(zerojax.value_and_grad(functools.partial(looked_up, asks), plan))
    plain = jax.value_and_grad(lambda table: jnp.mean(jnp.sin(table[TOKENS]) ** 2))
    assert_close(graded(params, TOKENS), (plain(TABLE)[0], {"table": plain(TABLE)[1]}), 1e-6)
    text = graded.lower(params, TOKENS).compile().as_text()
    # Which dimensions of size 1 the rows have depends on XLA.
    rows = [shape.replace("1,", "") for shape in re.findall(r"= f32\[([\d,]+)\]\S* gather\(", text)]
    assert not asks or rows == ["4,16"]


def test_a_wrong_spec_of_a_loss_is_said():
    state = tensor.placed(retyped(tensor.cpu_mesh(), EXPLICIT, EXPLICIT), 3)
    step = zerojax.train_step(lambda p, x: jnp.mean(jax.sharding.reshard(x, P("model"))))
    with pytest.raises(ValueError, match="has no axis 'model'"):
        step(state, tensor.BATCH)


def test_a_loss_closes_over_an_array_on_the_mesh():
    mesh = retyped(make_mesh(2), EXPLICIT)
    plan = zerojax.plan(tensor.make_state, stage=3, mesh=mesh)
    table = jax.device_put(np.ones(tensor.DIM, "f"), NamedSharding(mesh, P("data")))
    graded = lambda table: zerojax.value_and_grad(lambda p, x: tensor.scanned(p, x + table), plan)(
        tensor.make_state().params, tensor.BATCH
    )
    with pytest.raises(NotImplementedError) as told:
        graded(table)
    assert "jax.device_put(x, jax.sharding.NamedSharding(plan.mesh" in "".join(told.value.__notes__)
    typeless = jax.device_put(table, NamedSharding(plan.mesh, jax.typeof(table).sharding.spec))
    assert_close(graded(typeless), graded(np.ones(tensor.DIM, "f")), 0)


def test_what_needs_axes_of_another_type_is_told_with_a_remedy():
    """A loss for Explicit axes on Auto ones; a callback, which JAX compiles on Auto ones only."""
    seen = jax.ShapeDtypeStruct((), jnp.float32)
    calls = lambda p, x: (
        tensor.scanned(p, x)
        + jax.lax.stop_gradient(jax.pure_callback(lambda x: np.float32(0), seen, x))
    )
    for kind, loss, remedy in (
        (AUTO, explicit_loss, "Place the state on a mesh of Explicit axes"),
        (EXPLICIT, calls, "Place the state on a mesh of Auto axes"),
    ):
        state = tensor.placed(retyped(tensor.cpu_mesh(), kind, kind), 3)
        with pytest.raises(ValueError) as told:
            zerojax.train_step(loss)(state, tensor.BATCH)
        assert remedy in "".join(told.value.__notes__)


@pytest.mark.parametrize(
    ("types", "spec"),
    [((EXPLICIT, AUTO), "('data', 'tensor')"), ((AUTO, EXPLICIT), "('data', None)")],
)
def test_of_a_mixed_mesh_the_axis_is_named_that_a_loss_may_not_name(types, spec):
    """The error is that of JAX on this mesh, at the same line."""
    state = tensor.placed(retyped(tensor.cpu_mesh(), *types), 3)

    def loss(params, x):
        x = jnp.matmul(x, params["up"][0], out_sharding=P("data", None))
        return jnp.mean(jnp.matmul(x, params["down"][0], out_sharding=P("data", "tensor")))

    with pytest.raises(ValueError) as told:
        zerojax.train_step(loss)(state, tensor.BATCH)
    auto = ("data", "tensor")[types.index(AUTO)]
    assert re.search(rf"P(artitionSpec)?{re.escape(spec)} .*name: {auto} .*Auto", str(told.value))
    assert f"The axis {auto!r} of the state's mesh is Auto" in "".join(told.value.__notes__)


def test_padded_weights_are_whole_in_types_where_a_user_reads_them():
    """No type says that 8 devices share 60 rows. Nor does one of shapes say where to restore."""
    mesh = retyped(make_mesh(), EXPLICIT)
    state = zerojax.shard_train_state(make, stage=3, mesh=mesh)
    shown = jax.jit(lambda s: zerojax.unpad(s).params["b0"]["w"] * 2)(state)
    assert types([shown]) == ["float32[60,60]"] and shown.sharding.mesh.axis_types == (EXPLICIT,)
    model = nnx.Linear(64, 60, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3, mesh=mesh, min_shard_size=1)
    before, value = types([model.bias.get_raw_value()]), np.arange(60, dtype="f")
    model.bias.set_value(value)
    assert types([model.bias.get_raw_value()]) == before == ["float32[64@data]"]
    assert_close(model.bias.get_value(), value, 0)


# -- weights annotated with axes that the mesh lacks

WITH_AXES = nn.with_partitioning(nn.initializers.ones, (None, "model"))


def make_linen():
    params = nn.Dense(64, kernel_init=WITH_AXES).init(jax.random.key(0), ROWS[:, :32])["params"]
    return train_state(params, optax.adam(1e-2))


def make_nnx():
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    model = nnx.Linear(32, 64, kernel_init=init, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("names", ["data", "data model"])
def test_annotated_weights_are_made_where_a_mesh_is_set(kind, names):
    shape = (4, 2) if "model" in names else (8,)
    mesh = jax.make_mesh(shape, tuple(names.split()), axis_types=(kind,) * len(shape))
    with jax.set_mesh(mesh):
        state = zerojax.shard_train_state(make_linen, stage=3, mesh=mesh, min_shard_size=1)
        model, _ = zerojax.nnx.shard(make_nnx, stage=3, mesh=mesh, min_shard_size=1)
    plan = state.tx.plan
    assert plan._absent == {"model"} - {*mesh.axis_names}
    assert ("not in the mesh" in str(plan)) == ("model" not in names)
    for kernel in (state.params["kernel"].value, model.kernel.get_value()):
        assert kernel.addressable_shards[0].data.size == kernel.size // 8


def test_the_mesh_is_that_of_the_arrays_or_the_one_that_is_set():
    mesh, other = retyped(make_mesh(), EXPLICIT), retyped(tensor.cpu_mesh(), EXPLICIT, AUTO)
    put = lambda array: jax.device_put(array, NamedSharding(mesh, P()))
    made = make()
    carried = made.replace(params=jax.tree.map(put, made.params))
    with jax.set_mesh(other):
        assert zerojax.plan(carried, stage=3)._given_mesh == mesh
        state = zerojax.shard_train_state(make, stage=3, axis=other.axis_names)
        assert zerojax.shard_batch(ROWS).sharding == NamedSharding(other, P("data"))
        zerojax.train_step(loss, donate=False)(state, ROWS)
        grouped = zerojax.plan(make, stage=3, groups={"params": "data", "grads": "data"})
    assert state.params["v"].sharding.mesh == other
    assert grouped.batch_axes == other.axis_names
    both = (
        r"set a mesh \{'data': 8\}, .* \{'data': 2, 'tensor': 2\}.*place the state on the one that"
    )
    graded = jax.jit(lambda p, x: zerojax.value_and_grad(loss, state.tx.plan)(p, x))
    with jax.set_mesh(retyped(make_mesh(), AUTO)):
        for code in (
            lambda: zerojax.train_step(loss)(state, ROWS),
            lambda: zerojax.eval_step(loss)(state, ROWS),
            lambda: graded(state.params, ROWS),
        ):
            with pytest.raises(ValueError, match=both):
                code()
