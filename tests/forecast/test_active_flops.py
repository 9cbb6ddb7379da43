"""The FLOPs that mixtures of experts need: those of the experts that tokens are sent to."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import zerojax

ROWS, TOKENS, DIM, INNER, EXPERTS, TOP = 8, 16, 32, 64, 4, 2
BATCH = jax.ShapeDtypeStruct((ROWS, TOKENS, DIM), jnp.float32)
SHAPES = {"router": (DIM, EXPERTS), "up": (EXPERTS, DIM, INNER), "down": (EXPERTS, INNER, DIM)}
ROUTER = 2 * ROWS * TOKENS * DIM * EXPERTS
EXPERT = 2 * 2 * ROWS * TOKENS * DIM * INNER  # of all tokens, once
TX = optax.sgd(1.0)


def routed(x, p, top=TOP):
    """The shares and the numbers of the experts of each token."""
    return lax.top_k(jax.nn.softmax(x @ p["router"]), top)


def seated(x, p, top, room):
    """GShard's masks, (rows, tokens, experts, seats): with zeros for tokens without a seat."""
    shares, numbers = routed(x, p, top)
    chosen = jax.nn.one_hot(numbers, EXPERTS)  # rows, tokens, top, experts
    flat = chosen.reshape(ROWS, TOKENS * top, EXPERTS)
    seat = (flat * (flat.cumsum(1) - 1)).sum(-1).astype(int).reshape(numbers.shape)
    masks = chosen[..., None] * jax.nn.one_hot(seat, room)[..., None, :]
    return masks.sum(2), (masks * shares[..., None, None]).sum(2)


def capacity(x, p, top=TOP, room=12):
    dispatch, combine = seated(x, p, top, room)
    h = jnp.einsum("rtes,rtd->resd", dispatch, x)
    h = jax.nn.gelu(jnp.einsum("resd,edf->resf", h, p["up"]))
    return jnp.einsum("rtes,resd->rtd", combine, jnp.einsum("resf,efd->resd", h, p["down"]))


def ragged(x, p):
    shares, numbers = routed(x, p)
    order = numbers.reshape(-1).argsort()
    sizes = jax.nn.one_hot(numbers.reshape(-1), EXPERTS, dtype=jnp.int32).sum(0)
    h = jax.nn.silu(lax.ragged_dot(x.reshape(-1, DIM)[order // TOP], p["up"], sizes))
    y = lax.ragged_dot(h, p["down"], sizes)[order.argsort()]
    return (y.reshape(*shares.shape, DIM) * shares[..., None]).sum(2)


def gates(x, p):
    shares, numbers = routed(x, p)
    return (jax.nn.one_hot(numbers, EXPERTS) * shares[..., None]).sum(2)


def all_experts(x, p, combine="rte,rted->rtd"):
    h = jax.nn.silu(jnp.einsum("rtd,edf->rtef", x, p["up"]))
    return jnp.einsum(combine, gates(x, p), jnp.einsum("rtef,efd->rted", h, p["down"]))


def summed(x, p):
    each = lambda up, down: jnp.tanh(x @ up) @ down
    every = jax.vmap(each, out_axes=2)(p["up"], p["down"])
    return (gates(x, p)[..., None] * every).sum(2)


def in_a_loop(x, p):
    shares, y = gates(x, p), 0
    for at in range(EXPERTS):
        y += shares[..., at, None] * (jax.nn.relu(x @ p["up"][at]) @ p["down"][at])
    return y


def in_a_scan(x, p):
    def add(y, expert):
        share, up, down = expert
        return y + share[..., None] * (jax.nn.relu(x @ up) @ down), None

    experts = jnp.moveaxis(gates(x, p), -1, 0), p["up"], p["down"]
    return lax.scan(add, jnp.zeros_like(x), experts)[0]


def counted(function, shapes=SHAPES):
    state = {"params": {k: jnp.zeros(v) for k, v in shapes.items()}, "opt_state": ()}
    plan = zerojax.plan(state, stage=0, tx=TX)
    step = zerojax.train_step(lambda p, x: function(x, p).mean(), plan=plan, tx=TX)
    return zerojax.tools.step_flops(step, state, BATCH) / 3


def layered(function):
    """The mixture as a checkpointed layer of a scan, of which there are three."""
    layer = jax.checkpoint(lambda x, p: (x + function(x, p), None))
    return lambda x, p: lax.scan(layer, x, p)[0]


MIXTURES = {
    "capacity": (capacity, TOP),
    # Rooms for 4 * 12 of the 16 tokens of a row, and with seats for 12 of them.
    "top 1": (functools.partial(capacity, top=1), 1),
    "tight": (functools.partial(capacity, top=1, room=3), 12 / 16),
    "ragged": (ragged, TOP),
    "all": (all_experts, TOP),
    "vmap": (summed, TOP),
    "loop": (in_a_loop, TOP),
    "scan": (in_a_scan, TOP),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_count_for_the_tokens_that_they_get(name):
    function, times = MIXTURES[name]
    assert counted(function) == ROUTER + times * EXPERT
    shapes = {key: (3, *shape) for key, shape in SHAPES.items()}
    assert counted(layered(function), shapes) == 3 * (ROUTER + times * EXPERT)


def test_what_a_shard_map_splits_counts_on_all_devices():
    """Half of its rows are seats that a mask leaves empty."""
    mesh = zerojax.mesh(data=4, expert=2)

    def loss(p, x):
        dispatch, combine = seated(x, p, TOP, 16)
        rooms = jnp.einsum("rtes,rtd->ersd", dispatch, x)
        by = {"in_specs": P("expert"), "out_specs": P("expert"), "axis_names": {"expert"}}
        each = jax.shard_map(lambda h, w: jnp.einsum("ersd,edf->ersf", h, w), **by)
        return jnp.einsum("rtes,ersf->rtf", combine, each(rooms, p["up"])).mean()

    state = {"params": {k: jnp.zeros(v) for k, v in SHAPES.items()}, "opt_state": ()}
    plan = zerojax.plan(state, mesh=mesh, tx=TX, overrides={"up": P("expert", "data")})
    step = zerojax.train_step(loss, plan=plan, tx=TX)
    assert zerojax.tools.step_flops(step, plan.abstract(), BATCH) == 3 * (ROUTER + EXPERT)


def causal(x, p):
    """A mask by places only, and one by values that is not one-hot."""
    scores = jnp.einsum("rqd,rkd->rqk", x, x) * jnp.tril(jnp.ones((TOKENS, TOKENS)))
    scores = jnp.where(scores > 0, scores, 0) * (x[..., :1] == x[..., 0][:, None])
    return jnp.einsum("rqk,rkd->rqd", scores, x) @ p["w"]


def looked_up(x, p):
    labels = x.argmax(-1)
    return jax.nn.one_hot(labels, DIM) * jax.nn.log_softmax(x @ p["w"])


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (causal, 2 * 2 * ROWS * TOKENS**2 * DIM + 2 * ROWS * TOKENS * DIM * DIM),
        (looked_up, 2 * ROWS * TOKENS * DIM * DIM),
    ],
)
def test_other_masks_leave_flops_as_they_are(function, flops):
    assert counted(function, {"w": (DIM, DIM)}) == flops
