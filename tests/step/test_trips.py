"""What travels to experts that stay apart, and when: rounds, metrics, and what is printed."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from optax import sgd

import zerojax
from tests.support.collectives import unordered
from tests.support.compared import mesh_of
from zerojax._plan import expert

EXPERTS, DIM, HIDDEN, TOKENS = 8, 16, 48, 12
APART = {"mesh": mesh_of({"data": 2, "expert": 4}), "experts": {"expert": "experts"}}


@jax.jit
def make_params() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])
    up, down = (EXPERTS, DIM, HIDDEN), (EXPERTS, HIDDEN, DIM)
    experts = {"gate": normal(*up), "up": normal(*up), "down": normal(*down)}
    return {"router": normal(DIM, EXPERTS), "experts": experts}


def state_of(params: Any, **options: Any) -> Any:
    state = TrainState.create(apply_fn=None, params=params, tx=sgd(0.1))
    return zerojax.shard_train_state(state, stage=3, **options)


def batch(rows: int = 8) -> Any:
    return np.asarray(jax.random.normal(jax.random.key(1), (rows, TOKENS, DIM)))


def seated(params: Any, x: Any, combined: Any = lambda sits: sits) -> Any:
    """Each expert has 4 seats for a row's tokens."""
    p, shares = params["experts"], jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(shares.argmax(-1), EXPERTS)
    seat = (chosen * (chosen.cumsum(1) - 1)).sum(-1).astype(int)
    sits = chosen[..., None] * jax.nn.one_hot(seat, 4)[:, :, None]
    inputs = jnp.einsum("gsec,gsd->gecd", sits, x)
    hidden = jax.nn.silu(jnp.einsum("gecd,edf->gecf", inputs, p["gate"]))
    hidden *= jnp.einsum("gecd,edf->gecf", inputs, p["up"])
    outputs = jnp.einsum("gecf,efd->gecd", hidden, p["down"])
    return jnp.einsum("gsec,gecd->gsd", combined(sits), outputs)


def sorted_rows(params: Any, x: Any, number: Any = None) -> Any:
    p, rows = params["experts"], x.reshape(-1, DIM)
    number = (rows @ params["router"]).argmax(-1) if number is None else number.reshape(-1)
    order, sizes = number.argsort(), jnp.bincount(number, length=EXPERTS)
    dot = lambda rows, weights: jax.lax.ragged_dot(rows, weights, sizes)
    hidden = jax.nn.silu(dot(rows[order], p["gate"])) * dot(rows[order], p["up"])
    return dot(hidden, p["down"])[order.argsort()].reshape(x.shape)


def loss_of(mixture: Any) -> Any:
    return lambda params, x: jnp.mean((x + mixture(params, x)) ** 2)


def mean_of_parts(loss: Any, params: Any, x: Any, parts: int = 8) -> Any:
    """A loop: a program for each part would take as much longer to compile."""
    rows = x.reshape(parts, -1, *x.shape[1:])
    return jax.lax.map(lambda part: loss(params, part), rows).mean()


def compare(loss: Any, x: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
    """Compares a step with the mean of the loss over the rows of 8 devices; returns it, and its
    metrics."""
    params = params or make_params()
    mean = lambda params: mean_of_parts(loss, params, x)
    wanted, grads = jax.jit(jax.value_and_grad(mean))(params)
    step = zerojax.train_step(loss)
    state, metrics = step(state_of(params, **(APART | options)), x)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    trained = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, trained)
    return step, metrics


def sent(loss: Any, x: Any, **options: Any) -> list[Any]:
    """(kind, axes, bytes) of what a step sends over the axis of experts."""
    state = state_of(make_params(), **(APART | options))
    report = zerojax.audit(zerojax.train_step(loss), state, x)
    report.check()
    rows = [(one.kind, one.axes, round(one.wire_bytes)) for one in report.traffic]
    return [row for row in rows if row[1] == ("expert",) and row[2] > 64]


def test_slots_travel_once_there_and_once_back():
    state = state_of(make_params(), **APART)
    assert state.params["experts"]["up"].addressable_shards[0].data.shape == (2, 8, 48)
    rows = sent(loss_of(seated), batch())
    slots = EXPERTS * 4 * DIM * 4 * 3 // 4  # one row on each device; 3 of 4 parts travel
    # Backward sends what goes back to them; the batch has no gradient.
    assert rows == [("all-to-all", ("expert",), slots)] * 3
    step, _ = compare(loss_of(seated), batch())
    assert "expert: each device receives 3.0 KiB of rows for their experts in forward" in str(step)


def test_results_return_where_sums_of_them_are_more_bytes():
    rows = sent(loss_of(lambda params, x: seated(params, x, lambda sits: sits.cumsum(1))), batch())
    assert {kind for kind, *_ in rows} == {"all-to-all"}


@pytest.mark.parametrize("share", [1.0, 1.25, 4.0])
def test_rooms_of_any_size_drop_no_row(share):
    experts = zerojax.Experts("expert", "experts", room=share)
    _, metrics = compare(loss_of(sorted_rows), batch(16), experts=experts)
    parts = np.split(batch(16), 8)
    numbers = [(part.reshape(-1, DIM) @ make_params()["router"]).argmax(-1) for part in parts]
    each = [np.bincount(number // 2, minlength=4).max() / 6 for number in numbers]  # of 24 rows
    loads = np.max(each[:4]), np.max(each[4:])  # the fullest room of each 4 devices
    assert metrics["expert_load"] == pytest.approx(np.max(loads))
    overflows = [load * 6 > np.ceil(share * 6) for load in loads]
    assert metrics["expert_overflows"] == np.mean(overflows)


@pytest.mark.parametrize("expert", [0, 7])
def test_all_rows_for_one_expert(expert):
    def mixture(params, x):
        return sorted_rows(params, x, jnp.full(x.shape[:2], expert))

    _, metrics = compare(loss_of(mixture), batch(16))
    assert (metrics["expert_load"], metrics["expert_overflows"]) == (4, 1)


def test_rows_without_an_expert():
    def mixture(params, x):
        """The last 5 rows of a device belong to no group: a `ragged_dot` makes zeros of them."""
        rows, p = (x + params["router"][:, 0]).reshape(-1, DIM), params["experts"]
        sizes = jnp.array([3, 0, 2, 4, 0, 1, 8, 1])
        bias = 1 + jnp.tile(params["router"][0], HIDDEN // EXPERTS)  # of which free seats learn not
        hidden = jax.lax.ragged_dot(rows, p["up"], sizes) + bias
        return (
            jax.lax.ragged_dot(jnp.sin(hidden), p["down"], sizes).reshape(x.shape) + hidden.mean()
        )

    compare(loss_of(mixture), batch(16))


def test_rows_that_are_more_than_the_experts_stay():
    x = batch(256)
    step, _ = compare(loss_of(seated), x)
    assert not re.search("rows for their experts", str(step))
    assert re.search(r"experts, gathered for dot_general \(\S*test_trips.py:\d+", str(step))
    assert {kind for kind, *_ in sent(loss_of(seated), x)} == {"all-gather", "reduce-scatter"}


def test_experts_by_index_are_gathered_and_named():
    def mixture(params, x):
        number = (x @ params["router"]).argmax(-1)
        return jnp.einsum("gsd,gsdf->gsf", x, jnp.take(params["experts"]["up"], number, 0))[
            ..., :DIM
        ]

    step, _ = compare(loss_of(mixture), batch())
    gathered = r"each device receives 24.0 KiB of experts, gathered for gather \(\S*test_trips.py"
    assert re.search(gathered, str(step))


def test_derivatives_of_rows_are_not_summed():
    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(lambda x: (x / 2, None), lambda _, grad: (grad / 2,))
    compare(
        lambda params, x: jnp.mean(
            seated(params, halved(x @ params["router"] @ params["router"].T)) ** 2
        ),
        batch(),
    )


def test_sums_over_experts_return_as_sums():
    def mixture(params, x):
        p, shares = params["experts"], jax.nn.softmax(x @ params["router"])
        hidden = jax.nn.silu(jnp.einsum("gsd,edf->gsef", x, p["up"])) * shares[..., None]
        return jnp.sin(jnp.einsum("gsef,efd->gsd", hidden, p["down"]))

    step, _ = compare(loss_of(mixture), batch())
    assert "of rows for their experts" in str(step) and "gathered for" not in str(step)


def test_what_a_loop_carries_are_rows_beside_experts_that_it_reads():
    def loss(params, x):
        turn = lambda total, row: (jnp.sin(row + seated(params, total)), None)
        return jnp.mean(jax.lax.scan(turn, jnp.zeros_like(x[:1]), x[:, None])[0] ** 2)

    step, _ = compare(loss, batch(24))
    assert "of rows for their experts" in str(step) and "gathered for" not in str(step)


def test_what_layers_pass_on_are_rows_though_these_begin_with_zeros():
    def loss(params, x):
        layer = lambda total, p: (jnp.sin(x + seated(p, total)), None)
        return jnp.mean(jax.lax.scan(layer, jnp.zeros_like(x), params)[0] ** 2)

    params = jax.tree.map(lambda w: jnp.stack([w, w / 2]), make_params())
    step, _ = compare(loss, batch(), params)
    assert "of rows for their experts" in str(step) and "gathered for" not in str(step)


def test_each_layer_that_repeats_counts():
    def twice(params, x):
        number = jnp.zeros(x.shape[:2], int)
        return sorted_rows(params, sorted_rows(params, x, number), number)

    _, metrics = compare(loss_of(twice), batch(16))
    assert (metrics["expert_load"], metrics["expert_overflows"]) == (4, 2)


@pytest.mark.parametrize(("share", "warns"), [(1.01, True), (2.01, False)])
def test_rows_that_overflow_in_every_step_are_warned_of_once(share, warns, recwarn):
    def mixture(params, x):
        return sorted_rows(params, x, jnp.arange(x.size // DIM) // 3 % 4)  # half of a device's each

    experts = zerojax.Experts("expert", "experts", room=share)
    state, x = state_of(make_params(), **APART | {"experts": experts}), batch()
    step = zerojax.train_step(loss_of(mixture))
    compiled = step.compile(state, x)
    donated = jax.jit(lambda metrics: metrics, donate_argnums=0)
    for number in range(66):
        state, metrics = (step if number % 2 else compiled)(state, x)
        assert metrics["expert_load"] == 2
        assert number > 22 or not recwarn
        if number == 3:
            donated(metrics)  # the next 20 steps count
    texts = [str(each.message) for each in recwarn]
    assert len(texts) == warns
    room = "experts=zerojax.Experts('expert', 'experts', room=2)"
    assert all("rows overflowed" in text and room in text for text in texts)


def test_two_threads_run_steps_with_the_same_experts(monkeypatch):
    experts = zerojax.Experts("expert", "of two threads")
    metrics = {"expert_load": jnp.float32(2), "expert_overflows": jnp.int32(0)}
    others = []

    def is_ready(value):
        if not others:  # another thread ends a step just now
            others.append(value)
            expert.watch(experts, metrics)
        return True

    monkeypatch.setattr(expert._compat, "is_ready", is_ready)
    for _ in range(expert.WINDOW):
        expert.watch(experts, metrics)
    assert others


def test_a_masked_mean_of_sorted_rows_is_verified():
    def loss(params, x):
        layer = jax.checkpoint(lambda x, p: (jnp.tanh(x + sorted_rows(p, x)), None))
        y, _ = jax.lax.scan(layer, x, params)
        return zerojax.mean((y**2).mean(-1), where=x[..., 0] > x[..., 1])

    params = jax.tree.map(lambda w: jnp.stack([w, w / 2]), make_params())
    step, state = zerojax.train_step(loss, accumulate=2), state_of(params, **APART)
    result = zerojax.verify(step, state, batch(16))
    assert result.ok, str(result)


@jax.custom_vjp
def scaled_tanh(x, scale):
    return jnp.tanh(x) * scale


scaled_tanh.defvjp(
    lambda x, scale: (jnp.tanh(x) * scale, (jnp.tanh(x), scale)),
    lambda kept, grad: (grad * kept[1] * (1 - kept[0] ** 2), (grad * kept[0]).sum(0)),
)


def in_rooms(change: Any) -> Any:
    """`change(hidden, x, params)` is between two `ragged_dot`."""

    def mixture(params, x):
        p, rows = params["experts"], x.reshape(-1, DIM)
        number = (rows @ params["router"]).argmax(-1)
        order, sizes = number.argsort(), jnp.bincount(number, length=EXPERTS)
        hidden = jax.lax.ragged_dot(rows[order] + params["router"][:, 0], p["up"], sizes)
        hidden = change(hidden, x, params).reshape(-1, HIDDEN)
        return jax.lax.ragged_dot(hidden, p["down"], sizes)[order.argsort()].reshape(x.shape)

    return mixture


@pytest.mark.parametrize(
    "change",
    [
        lambda h, x, p: scaled_tanh(h, jnp.tile(p["router"][0], HIDDEN // EXPERTS)),
        lambda h, x, p: h / jnp.abs(x).max(),
        lambda h, x, p: jnp.sin(h.reshape(len(h) // 2, 2, HIDDEN)),
        lambda h, x, p: h @ (h.T @ h) / 100,
        lambda h, x, p: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    ],
    ids=["own derivative", "own number", "pairs of rows", "all rows", "no derivative at 0"],
)
def test_what_rooms_can_not_run_returns_first(change):
    compare(loss_of(in_rooms(change)), batch(16))


def test_devices_whose_rows_decide_have_all_experts():
    def loss(params, x):
        """Some devices apply the experts, and some do not."""
        return jnp.mean(jax.lax.cond(x[0, 0, 0] > 0, lambda: x + seated(params, x), lambda: x) ** 2)

    step, _ = compare(loss, batch())
    assert re.search(r"experts, gathered for cond \(\S*test_trips.py", str(step))


def test_rules_of_other_parameters_run_as_they_are():
    clipped = jax.custom_vjp(lambda w: w)
    clipped.defvjp(lambda w: (w, None), lambda _, grad: (jnp.clip(grad, -1e-3, 1e-3),))
    loss = lambda params, x: (
        jnp.mean((x @ clipped(params["router"])) ** 2) + loss_of(seated)(params, x)
    )
    compare(loss, batch())


def test_sizes_of_one_kind_in_several_dtypes_gather_no_experts():
    def mixture(params, x):
        p, rows = params["experts"], x.reshape(-1, DIM)
        number = (rows @ params["router"]).argmax(-1)
        order, sizes = number.argsort(), jnp.bincount(number, length=EXPERTS)
        hidden = jnp.sin(jax.lax.ragged_dot(rows[order], p["up"], sizes.astype("uint32")))
        out = jax.lax.ragged_dot(hidden, p["down"], sizes.astype("int16"))
        return out[order.argsort()].reshape(x.shape)

    step, _ = compare(loss_of(mixture), batch())
    assert "gathered for" not in str(step)


def test_a_loss_may_speak_over_the_axis():
    def loss(params, x):
        return loss_of(seated)(params, x) * zerojax.mean(x**2)

    x, params = batch(), make_params()
    _, metrics = zerojax.train_step(loss)(state_of(params, **APART), x)
    wanted = mean_of_parts(loss_of(seated), params, x) * np.mean(x**2)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def balanced(params, batch, share=None):
    """Adds the share of tokens of each expert times its mean probability."""
    shares = jax.nn.softmax(batch["x"] @ params["router"])
    mean = jnp.vectorize(zerojax.mean)
    chosen = jax.nn.one_hot(shares.argmax(-1), EXPERTS).mean((0, 1))
    share = mean(chosen) if share is None else share
    balance = EXPERTS * (share * mean(shares.mean((0, 1)))).sum()
    return loss_of(sorted_rows)(params, batch["x"]) + balance


def test_a_balancing_loss_of_microbatches():
    x, params = batch(16), make_params()
    chosen = jax.nn.one_hot(jax.nn.softmax(x @ params["router"]).argmax(-1), EXPERTS)
    share = chosen.mean((0, 1))
    batch_specs = {"x": P(("data", "expert")), "share": P()}
    rows = {"x": x, "share": share}
    options = {"accumulate": 2, "batch_specs": batch_specs}
    step = zerojax.train_step(balanced, **options)
    with pytest.raises(
        ValueError, match=r"batch_specs=.* balances experts may leave zerojax\.mean"
    ):
        step(state_of(params, **APART), rows)
    constant = lambda params, batch: balanced(params, batch, batch["share"])
    whole, metrics = zerojax.train_step(balanced, batch_specs=batch_specs)(
        state_of(params, **APART), rows
    )
    state, parts = zerojax.train_step(constant, **options)(state_of(params, **APART), rows)
    np.testing.assert_allclose(parts["loss"], metrics["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, whole.params
    )


@pytest.mark.parametrize("mixture", [seated, sorted_rows])
def test_sequences_beside_experts(mixture):
    def loss(params, x):
        attended = jax.nn.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None])
        return jnp.mean((x + mixture(params, x + attended[:, :, 0])) ** 2)

    x, params = batch(4), make_params()
    options = {**APART, "mesh": mesh_of({"data": 2, "sequence": 2, "expert": 2})}
    split = {"sequence": zerojax.Sequences(most_gathered=9), **options}
    step, state = zerojax.train_step(loss), state_of(params, **split)
    branches, left = unordered(zerojax.audit(step, state, x).module)
    assert left == [] and bool(branches) == (mixture is sorted_rows)
    _, metrics = step(state, x)
    wanted = mean_of_parts(loss, params, x, 4)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
