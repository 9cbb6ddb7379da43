"""What new users stumble over: each is told what to do, and doing it works."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step
from zerojax.checkpoint import export_safetensors

TX = optax.sgd(1e-2)


def params():
    kernel, up = jnp.arange(1.0, 97 * 17 + 1).reshape(97, 17), jnp.ones((64, 17))
    return {"head": {"kernel": kernel, "bias": jnp.zeros(17)}, "up": up}


def loss(params, x):
    return jnp.mean((x @ params["up"] @ params["head"]["kernel"].T) ** 2)


# -- parts of padded parameters, which leave


class Net(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(17, 97, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def padded():
    state = TrainState.create(apply_fn=Net, params=params(), tx=TX)
    state = zerojax.shard_train_state(state, stage=3)
    assert state.params["head"]["kernel"].shape == (104, 17)
    return state


@pytest.fixture(scope="module")
def model():
    net = Net()
    return zerojax.nnx.shard(net, nnx.Optimizer(net, TX, wrt=nnx.Param), stage=3)


PARTS = {
    "a part": lambda state, _: state.params["head"],
    "picked": lambda state, _: {"w": state.params["head"]["kernel"]},
    "all of them": lambda state, _: state.params,
    "of nnx": lambda _, model: nnx.state(model[0].head),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_leaves_without_its_padding(part, padded, model, tmp_path):
    tree = part(padded, model)
    export_safetensors(tmp_path / "weights", tree)
    assert kernel_in(tmp_path / "weights") in ((97, 17), (17, 97))
    for full in (dict(zerojax.stream(tree)), zerojax.gather_params(nnx.as_pure(tree))):
        shapes = {leaf.shape for leaf in jax.tree.leaves(full)}
        assert shapes & {(97, 17), (17, 97)} and not shapes & {(104, 17), (17, 104)}


def kernel_in(path):
    (file,) = path.glob("*.safetensors")
    return next(x.shape for x in safetensors.numpy.load_file(file).values() if x.ndim == 2)


def test_an_array_of_that_shape_leaves_with_all_its_rows(padded, tmp_path):
    kernel = padded.params["head"]["kernel"]
    own = {"w": jax.device_put(jnp.ones(kernel.shape), kernel.sharding)}
    export_safetensors(tmp_path / "ones", own)
    assert kernel_in(tmp_path / "ones") == (104, 17)


def test_a_state_knows_that_zeros_of_that_shape_are_its_own(padded, tmp_path):
    like, zeros = padded.params["head"]["kernel"], {"w": jnp.zeros((104, 17))}
    state = train_state(zeros, TX)
    state = zerojax.shard_train_state(state, stage=3)
    assert state.params["w"].sharding == like.sharding
    export_safetensors(tmp_path / "state", state)
    export_safetensors(tmp_path / "plan", state.params, plan=state.tx.plan)
    assert kernel_in(tmp_path / "state") == kernel_in(tmp_path / "plan") == (104, 17)


# -- meshes and batches


def test_the_mesh_in_a_message_is_one_of_all_devices():
    state, line = (params(), ()), r"zerojax\.mesh\(node=2, gpu=-1\)"
    with pytest.raises(ValueError, match=line):
        zerojax.plan(state, groups={"params": "gpu"})
    with pytest.raises(ValueError, match=line):
        zerojax.plan(state)._regathering(("gpu",))
    mesh = zerojax.mesh(node=2, gpu=-1)
    assert mesh.shape == {"node": 2, "gpu": 4}
    zerojax.plan(state, mesh=mesh, groups={"params": "gpu"})._regathering(("gpu",))


TWO = jax.sharding.Mesh(jax.devices()[:2], ("data",))
ROWS = np.ones((9, 64), np.float32)


def a_step(**options):
    return lambda state, plan: train_step(loss, **options)(state, ROWS)


def with_its_plan(**options):
    def call(state, plan):
        pair = plan.place((params(), TX.init(params())))
        train_step(loss, plan=plan, tx=TX, **options)(pair, ROWS)

    return call


def along_columns(state, plan):
    specs = P(None, "data")
    zerojax.train_step(lambda p, x: loss(p, x.T), batch_specs=specs)(state, ROWS.T)


CALLS = [
    (a_step(), {}, "batch, like=state"),
    (a_step(), {"mesh": TWO}, "batch, like=state"),
    (a_step(accumulate=2), {"mesh": TWO}, "batch, accumulate=2, like=state"),
    (with_its_plan(), {}, "batch, like=plan"),
    (with_its_plan(accumulate=2), {"mesh": TWO}, "batch, accumulate=2, like=plan"),
    (along_columns, {}, "batch, like=state, batch_specs=batch_specs"),
    (
        lambda _, plan: zerojax.value_and_grad(loss, plan)(params(), ROWS),
        {"mesh": TWO},
        "batch, like=plan",
    ),
    (lambda _, plan: zerojax.shard_batch(ROWS, TWO), {}, "batch, like=mesh"),
    (lambda _, plan: zerojax.shard_batch(ROWS, like=plan), {"mesh": TWO}, "batch, like=plan"),
    (lambda state, _: zerojax.shard_batch(ROWS, like=state), {"mesh": TWO}, "batch, like=state"),
]


@pytest.mark.parametrize(("call", "placed", "given"), CALLS, ids=[f"{row[2]}" for row in CALLS])
def test_the_line_that_pads_a_batch_is_for_that_call(call, placed, given):
    plan = zerojax.plan((params(), TX.init(params())), stage=1, tx=TX, **placed)
    state = train_state(params(), TX)
    state = zerojax.shard_train_state(state, stage=1, **placed)
    with pytest.raises(ValueError, match=r"9 examples.*or pad: batch, mask = ") as raised:
        call(state, plan)
    check_line(str(raised.value), given, state=state, plan=plan, mesh=TWO)


def test_the_line_that_pads_a_batch_of_nnx():
    net = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
    model, optimizer = zerojax.nnx.shard(net, nnx.Optimizer(net, TX, wrt=nnx.Param), mesh=TWO)
    step = zerojax.nnx.train_step(lambda model, x: model(x).mean(), accumulate=2)
    with pytest.raises(ValueError, match=r"9 examples.*or pad: batch, mask = ") as raised:
        step(model, optimizer, ROWS)
    check_line(str(raised.value), "batch, accumulate=2, like=optimizer", optimizer=optimizer)


def check_line(message, given, **names):
    """The line has these arguments, and makes of the batch one of the numbers beside it."""
    found = re.search(r"(\d+) examples, or pad: .*= (zerojax\.pad_batch\((.*?)\)), with", message)
    assert found is not None and found[3] == given
    by_columns = "batch_specs" in given
    names |= {"batch": ROWS.T if by_columns else ROWS, "batch_specs": P(None, "data")}
    batch, mask = eval(found[2], {"zerojax": zerojax}, names)
    assert batch.shape[by_columns] == int(found[1]) and mask.sum() == 9


COLUMNS = np.ones((32, 64), np.float32)
WRITTEN = {  # losses of so many rows
    "reshaped": lambda rows: lambda p, x: loss(p, x.reshape(rows, 8, 8).reshape(rows, 64)),
    "asserted": lambda rows: lambda p, x: loss(p, x) if len(x) == rows else 1 / 0,
    "closed over": lambda rows: lambda p, x: loss(p, x + COLUMNS[:rows]),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_a_number_of_rows_in_a_loss(written):
    state = zerojax.shard_train_state(train_state(params(), TX), stage=3)
    with pytest.raises((TypeError, ZeroDivisionError)) as raised:
        train_step(written(32), accumulate=2, donate=False)(state, COLUMNS)
    note, *_ = raised.value.__notes__
    assert note.startswith("The loss sees 2 of the batch's 32 rows at a time, and runs on all 32")
    train_step(written(2), accumulate=2, donate=False)(state, COLUMNS)
    with pytest.raises((TypeError, ZeroDivisionError)) as raised:
        train_step(written(7))(state, COLUMNS)
    assert not any("rows at a time" in note for note in getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize(("rows", "options"), [(8, {}), (16, {"accumulate": 2})])
def test_one_row_does_not_broadcast_with_an_array_of_a_row_for_each_example(rows, options):
    """A table of as many positions is another matter, also if the loss takes only one row."""
    state = zerojax.shard_train_state(train_state(params(), TX), stage=3)
    weights, table, batch = jnp.arange(rows), np.ones((rows, 64)), np.ones((rows, rows, 64), "f")
    losses = lambda p, x: jnp.mean((x @ p["up"]) ** 2, (1, 2))
    with pytest.raises(TypeError, match="incompatible shapes") as raised:
        train_step(lambda p, x: jnp.mean(losses(p, x) * weights), **options)(state, batch)
    note, *_ = raised.value.__notes__
    assert note.startswith(f"The loss sees 1 of the batch's {rows} rows at a time, and runs on all")
    for most in (1, rows):
        placed = lambda p, x: losses(p, x + table).mean() if len(x) <= most else 1 / 0
        _, metrics = train_step(placed, **options, donate=False)(state, batch)
        assert metrics["loss"] == pytest.approx(4 * 64**2)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_ordered_print(stage, capsys):
    def printing(ordered):
        def of(params, x):
            jax.debug.print("rows: {}", len(x), ordered=ordered)
            return loss(params, x)

        return of

    state = zerojax.shard_train_state(train_state(params(), TX), stage=stage)
    with pytest.raises(ValueError, match=r"(?i)ordered effects") as raised:
        train_step(printing(True))(state, COLUMNS)
    assert "Leave ordered=True out of jax.debug.print" in "".join(raised.value.__notes__)
    train_step(printing(False))(state, COLUMNS)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("rows: 4") == 8


# -- metrics, codes


@pytest.mark.parametrize("of_nnx", [True, False])
def test_metrics_that_a_loss_updates(of_nnx):
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def of_model(model, x):
        value = model(x).mean()
        metrics.update(loss=value)
        return value

    net = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
    step = zerojax.nnx.train_step(of_model)
    args = zerojax.nnx.shard(net, nnx.Optimizer(net, TX, wrt=nnx.Param))
    if not of_nnx:
        step = zerojax.train_step(lambda params, x: of_model(lambda x: x @ params["w"], x))
        state = train_state({"w": jnp.ones((64, 16))}, TX)
        args = (zerojax.shard_train_state(state),)
    says = r"return loss, logits, and update them after the step: metrics.update\(loss=values\['lo"
    with pytest.raises(Exception, match="Cannot mutate MetricState") as raised:
        step(*args, ROWS[:8])
    assert any(re.search(says, note) for note in raised.value.__notes__)


def test_a_plan_says_why_a_frozen_matrix_has_no_codes(capsys):
    params = {"heads": jnp.ones((64, 4, 16)), "up": jnp.ones((48, 64)), "lora": jnp.ones((32, 4))}
    params["norm"] = jnp.ones(24)
    mask = {"heads": True, "up": True, "lora": False, "norm": True}
    tx = optax.selective_transform(TX, freeze_mask=mask)
    state = train_state(params, tx)
    assert "kept as" not in str(zerojax.plan(state, stage=3))
    plan = zerojax.plan(zerojax.quantize(state), stage=3)
    why = "wide: no block of 32 to 64 divides rows of 16"
    (row,) = (line for line in str(plan).splitlines() if "no block" in line)
    assert "params/heads" in row and why in row
    plan.show("params/heads")
    assert f", kept {why}" in capsys.readouterr().out
    # A mask with nodes of codes, and so an optimizer's state with them.
    codes = {"base": zerojax.quantize({"up": params["up"]}), "lora": params["lora"]}
    mask_of_codes = {"base": jax.tree.map(lambda _: True, codes["base"]), "lora": False}
    adapted = optax.selective_transform(optax.adam(1e-3), freeze_mask=mask_of_codes)
    adapted = train_state(codes, adapted)
    assert "params/base/up/nf4" in str(zerojax.plan(adapted, stage=3))
    del params["up"], mask["up"]
    with pytest.raises(ValueError, match=r"nothing: .* heads, float32\[64, 4, 16\].*longer rows"):
        zerojax.quantize(train_state(params, tx))


# -- gradients of each example, and two copies of parameters

SQUARES = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
W = {"w": np.linspace(-1, 1, 64 * 15, dtype=np.float32).reshape(64, 15)}
EXAMPLES = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
AS_ROWS = r"rows of its aux: losses, grads = jax.vmap\(jax.value_and_grad.*has_aux=True"


@pytest.mark.parametrize("shape", [(16, 64), (16, 1, 64)])
def test_gradients_of_each_example_are_rows_of_aux(shape):
    of_one = zerojax.value_and_grad(SQUARES, zerojax.plan({"params": W}))
    with pytest.raises((TypeError, ValueError)) as raised:
        jax.vmap(of_one, (None, 0))(W, EXAMPLES.reshape(shape))
    assert re.search(AS_ROWS, "".join(raised.value.__notes__))


def test_lookahead_takes_the_gradients_of_its_fast_parameters():
    both = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(W)
    fast = lambda params, x: SQUARES(params.fast, x)

    def placed_with(tx):
        return zerojax.shard_train_state(train_state(params, tx))

    with pytest.raises(TypeError, match=r"tx.update\(grads.fast, \*others.*docs/recipes.md"):
        zerojax.train_step(fast)(placed_with(both), EXAMPLES)
    tx = optax.GradientTransformation(both.init, lambda g, *others: both.update(g.fast, *others))
    state, step = placed_with(tx), zerojax.train_step(fast)
    opt_state = both.init(params)
    for _ in range(3):
        state, _ = step(state, EXAMPLES)
        updates, opt_state = both.update(
            jax.grad(SQUARES)(params.fast, EXAMPLES), opt_state, params
        )
        params = optax.apply_updates(params, updates)
    assert_close(zerojax.gather_params(state), params, 1e-4)
    with pytest.raises(ValueError, match=r"parameters in fast: pass all.* read params.fast, or"):
        zerojax.value_and_grad(SQUARES, state.tx.plan)(state.params.fast, EXAMPLES)
