"""Programs of every shape: gradients equal jax.grad's, and no full weight outlives its use."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh, mostly_slow
from tests.engine.losses import (
    BATCH,
    DIM,
    LAYERS,
    PARAMS,
    PROGRAMS,
    dense,
    end,
    fully_unrolled,
    plain_scan,
    sharded_grad,
)
from tests.reference import assert_close
from zerojax._hlo.module import Module

NARROW = {"mixed_dtypes", "wider_before_the_scan", "unstacked"}  # bfloat16 somewhere


# Stage 2 is the same engine with weights that are there already, and without prefetching it does
# the same in another order: a program of each kind tells.
KINDS = {"plain_scan", "remat_in_the_middle", "tied_everywhere", "frozen_layers", "halves"}


@pytest.mark.parametrize(
    ("name", "stage", "prefetch"),
    mostly_slow(
        [(name, *case) for name in PROGRAMS for case in ((2, 0), (3, 0), (3, 1))],
        lambda name, stage, prefetch: prefetch or name in KINDS,
    ),
)
def test_gradients_match_jax_grad(name, stage, prefetch):
    loss = PROGRAMS[name]
    wanted_loss, wanted = jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)
    grad, params = sharded_grad(loss, stage, prefetch=prefetch)
    value, grads = grad(params, BATCH)
    tolerance = 2e-2 if name in NARROW else 1e-6
    assert float(value) == pytest.approx(float(wanted_loss), rel=tolerance)
    assert_close(grads, wanted, tolerance)


SEVERAL_GATHERS = {
    "frozen_layers",  # two loops over one stack
    "remat_around_the_scan",  # a third forward pass, which the user asked for
    "groups_under_remat",  # a stack made of two is gathered whole
    "frozen_where_used_once",  # what is frozen is not reduced
    "frozen_inside",
    "two_encoders",  # two loops, each under a remat of its own
    "tied_everywhere",
}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - SEVERAL_GATHERS))
def test_weights_are_gathered_at_most_twice_and_reduced_once(name):
    """What the layer loops and scopes owe: three trips over the wire for each parameter."""
    grad, params = sharded_grad(PROGRAMS[name], 3)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    gathered = sum(c.moved for c in found if c.kind == "all-gather")
    reduced = sum(c.moved for c in found if c.kind == "reduce-scatter")
    assert 0 < reduced <= gathered <= 2 * reduced
    assert reduced <= sum(x.size for x in jax.tree.leaves(PARAMS))
    summed = [c.elements for c in found if c.kind == "all-reduce"]
    assert summed and max(summed) <= DIM  # the loss among them


def test_fully_unrolled_layers_are_gathered_again_in_backward():
    grad, params = sharded_grad(fully_unrolled, 3)
    assert sum(c.times for c in collectives(grad.trace(params, BATCH).jaxpr)
               if c.kind == "all-gather") == 2 * 2 * LAYERS  # fmt: skip
    assert gathers_compiled(grad, params) == 2 * 2 * LAYERS


def test_regather_false_gathers_once_and_keeps():
    grad, params = sharded_grad(plain_scan, 3, regather=False)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    size = sum(x.size for x in jax.tree.leaves(PARAMS["a"]))
    assert sum(c.moved for c in found if c.kind == "all-gather") == size


def gathers_compiled(grad, params):
    return grad.lower(params, BATCH).compile().as_text().count(" all-gather(")


def test_unrolled_layers_are_gathered_again_in_backward():
    layers = [{"w": PARAMS["a"]["w"][i], "b": jnp.ones(DIM)} for i in range(LAYERS)]

    def loss(layers, batch):
        return end(functools.reduce(dense, layers, batch["x"]))

    plan = zerojax.plan({"params": layers}, stage=3, mesh=make_mesh(), min_shard_size=1)
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    params = plan.place({"params": layers})["params"]
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    size = sum(x.size for x in jax.tree.leaves(layers))
    assert sum(c.moved for c in found if c.kind == "all-gather") == 2 * size
    assert sum(c.moved for c in found if c.kind == "reduce-scatter") == size
    # Biases are not needed again, nor the first matrix: nobody asks for the batch's gradient.
    assert gathers_compiled(grad, params) == 2 * LAYERS + LAYERS - 1
    assert_close(grad(params, BATCH)[1], jax.grad(loss)(layers, BATCH), 1e-6)


def scoped_loss(params, tokens):
    """A loop over layers, then two layers in Python, each of them in name scopes of the user's."""

    def layer(x, p):
        with jax.named_scope("mlp"):
            with jax.named_scope("up"):
                hidden = jnp.tanh(x @ p["up"].astype(x.dtype))
            with jax.named_scope("down"):
                return x + hidden @ p["down"].astype(x.dtype), None

    x = params["embed"].astype(jnp.bfloat16)[tokens]
    with jax.named_scope("trunk"):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    for at in range(2):
        with jax.named_scope(f"top{at}"):
            x, _ = jax.checkpoint(layer)(x, params["top"][at])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"].astype(x.dtype)).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def scoped(gpu_code):
    """The instructions of that loss's step, and what each collective serves, on 8 H100s."""
    mlp = {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))}
    params = {"layers": jax.tree.map(lambda x: jnp.stack([x] * 4), mlp), "top": [mlp, mlp]}
    params |= {"embed": jnp.ones((512, 256)), "head": jnp.ones((256, 512))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    plan = zerojax.plan(state, stage=3, mesh=zerojax.aot.mesh("8xH100"))
    tokens = zerojax.aot.batch(jax.ShapeDtypeStruct((4096,), jnp.int32), plan)
    compiled = zerojax.train_step(scoped_loss).lower(plan.abstract(), tokens).compile()
    instructions = [i for c in Module(compiled.as_text()).computations.values() for i in c.values()]
    return instructions, zerojax.audit(compiled, plan=plan).traffic


def test_a_gpu_program_names_each_collectives_parameters(scoped):
    """Alike layers of a Python loop share one program, so their names have a star."""
    _, traffic = scoped
    serving = [one for one in traffic if one.paths]
    assert {one.kind for one in serving} == {"all-gather", "reduce-scatter"}
    for one in serving:
        for path in one.paths:
            *folder, name = re.sub(r"/top/\d", "/top/*", path).split("/")
            # Of combined collectives XLA joins the names, and writes what they share once:
            # params/layers/(up/all_gather:down/all_gather).
            assert "/".join(folder) in one.scope and re.search(rf"\b{name}\b", one.scope)
            assert one.scope.rstrip(")").endswith(one.kind.replace("-", "_"))


def test_a_gpu_program_names_the_scopes_of_matmuls(scoped):
    instructions, _ = scoped
    scopes = [i.op_name for i in instructions if "dot" in i.name and "gemm" in i.name]
    missing = [scope for scope in scopes if not re.search(r"mlp.*\b(up|down)\b|\bhead\b", scope)]
    assert not missing
    in_loop = [scope for scope in scopes if "/while/" in scope]
    assert len(in_loop) >= 6 and all("trunk" in scope for scope in in_loop)
    for scope in ("top0", "top1"):  # two matmuls forward, four backward
        assert sum(scope in one for one in scopes) >= 6
