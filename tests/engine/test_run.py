"""Programs of every shape: gradients equal jax.grad's, and no full weight outlives its use."""

import functools
import math
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh, mostly_slow
from tests.reference import assert_close
from zerojax import _compat
from zerojax._engine import xla_options as _xla_options

LAYERS, DIM = 4, 16
KEYS = jax.random.split(jax.random.key(0), 20)


def stack(i, *shape):
    return jax.random.normal(KEYS[i], (LAYERS, *shape)) / DIM**0.5


PARAMS = {
    "a": {"w": stack(0, DIM, DIM), "b": stack(1, DIM)},
    "c": {"w": stack(2, DIM, 2 * DIM), "v": stack(3, 2 * DIM, DIM)},
    "shared": jax.random.normal(KEYS[4], (DIM, DIM)) / DIM**0.5,
    "table": jax.random.normal(KEYS[5], (32, DIM)),
    "single": {"w": jax.random.normal(KEYS[6], (DIM, DIM)) / DIM**0.5},
    "odd": {"w": stack(7, DIM, DIM), "gain": 1 + stack(8, 3)},
}
BATCH = {
    "x": jax.random.normal(KEYS[9], (16, DIM)),
    "t": jax.random.randint(KEYS[10], (16,), 0, 5),
}


def dense(x, p):
    return jnp.tanh(x @ p["w"] + p["b"])


def scan(body, x, xs, **kwargs):
    return lax.scan(lambda x, p: (body(x, p), None), x, xs, **kwargs)[0]


def end(x):
    return jnp.mean(x**2)


def plain_scan(p, batch):
    return end(scan(dense, batch["x"], p["a"]))


def reverse_unrolled_scan(p, batch):
    return end(scan(dense, batch["x"], p["a"], reverse=True, unroll=2))


def scan_with_outputs(p, batch):
    def body(x, layer_and_noise):
        layer, noise = layer_and_noise
        x = dense(x, layer) + noise
        return x, (x.sum(-1), layer["w"].sum())

    noise = jnp.linspace(0, 1, LAYERS)
    x, (sums, norms) = lax.scan(body, batch["x"], (p["a"], noise))
    return end(x) + jnp.mean(sums**2) + jnp.sum(norms**2)


def several_stacks(p, batch):
    encoded = scan(dense, batch["x"], p["a"])

    def cross(x, layer):
        return x + jax.nn.relu((x * encoded) @ layer["w"]) @ layer["v"]

    return end(scan(cross, batch["x"], p["c"]))


def constants_with_gradients(p, batch):
    def body(x, layer):
        return dense(x, layer) @ p["shared"] + scale * batch["x"]

    scale = jnp.sum(p["table"])
    return end(scan(body, batch["x"], p["a"]))


def groups_of_layers(p, batch):
    grouped = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), p["a"])
    return end(scan(lambda x, group: scan(dense, x, group), batch["x"], grouped))


def groups_under_remat(p, batch):
    stacked = jax.tree.map(lambda a: jnp.stack([a, a * 0.5]), p["a"])
    group = jax.checkpoint(lambda x, g: scan(jax.checkpoint(dense), x, g))
    return end(scan(group, batch["x"], stacked))


def remat_body(policy, p, batch):
    def body(x, layer):
        hidden = checkpoint_name(jax.nn.gelu(x @ layer["w"]), "hidden")
        return x + hidden @ layer["v"]

    return end(scan(jax.checkpoint(body, policy=policy), batch["x"], p["c"]))


def remat_in_the_middle(p, batch):
    def body(x, layer):
        x = x + jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w.T)(x, layer["w"])
        return jax.checkpoint(dense)(x * 0.5, layer)

    return end(scan(body, batch["x"], p["a"]))


def remat_around_the_scan(p, batch):
    return end(jax.checkpoint(lambda x, a: scan(dense, x, a))(batch["x"], p["a"]))


def jitted_inside(p, batch):
    layer = jax.jit(dense)
    body = jax.jit(lambda x, q: layer(layer(x, q), q))
    return end(jax.jit(functools.partial(scan, body))(batch["x"], p["a"]))


def call_returns_what_it_got(p, batch):
    w, x, one, again = jax.jit(lambda w, x: (w, x * 2, 1.0, w))(p["shared"], batch["x"])
    return end(x @ w @ again) * one


def control_flow_inside(p, batch):
    def body(x, layer):
        x = lax.cond(layer["b"].sum() > 0, dense, lambda x, q: x @ q["w"], x, layer)
        return lax.fori_loop(0, 2, lambda _, y: jnp.sin(y @ layer["w"]), x)

    return end(scan(body, batch["x"], p["a"]))


@jax.custom_vjp
def twice_the_gradient(x, w):
    return x @ w


twice_the_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (2 * g @ res[1].T, 2 * res[0].T @ g)
)


def custom_derivative_inside(p, batch):
    body = lambda x, layer: jax.nn.silu(twice_the_gradient(x, layer["w"]))
    return end(scan(body, batch["x"], p["a"]) + twice_the_gradient(batch["x"], p["shared"]))


def weight_normalisation(p, batch):
    def body(x, layer):
        w = layer["w"] / jnp.linalg.norm(layer["w"], axis=0)
        return jnp.tanh(x @ w.T + layer["b"])

    return end(scan(body, batch["x"], p["a"]))


def mixed_dtypes(p, batch):
    def body(x, layer):
        h = x.astype(jnp.bfloat16) @ layer["w"].astype(jnp.bfloat16)
        return x + jnp.tanh(h.astype(jnp.float32) + layer["b"])

    return end(scan(body, batch["x"], p["a"]))


def frozen_layers(p, batch):
    frozen = lax.stop_gradient(p["a"])
    return end(scan(dense, scan(dense, batch["x"], frozen), p["a"]) @ p["shared"])


def tied_everywhere(p, batch):
    x = p["table"][batch["t"]]
    x = jax.checkpoint(lambda x, e: x @ e.T @ e)(x, p["table"])
    logits = scan(dense, x, p["a"]) @ p["table"].T
    return -jax.nn.log_softmax(logits)[:, 0].mean()


def python_loop(p, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = dense(x, jax.tree.map(lambda a: a[i], p["a"]))
    return end(x)


def recurrent(p, batch):
    def cell(h, x):
        h = jnp.tanh(h @ p["shared"] + x)
        return h, h

    _, hs = lax.scan(cell, jnp.zeros_like(batch["x"]), jnp.stack([batch["x"]] * 3))
    return end(hs)


def weights_in_the_carry(p, batch):
    def body(carry, _):
        x, w = carry
        return (jnp.tanh(x @ w), w * 0.9), None

    (x, _), _ = lax.scan(body, (batch["x"], p["shared"]), None, length=3)
    return end(x)


def dropout_keys(p, batch):
    keys = jax.random.split(jax.random.key(3), LAYERS)

    def body(x, layer_and_key):
        layer, key = layer_and_key
        return dense(x, layer) * jax.random.bernoulli(key, 0.9, (DIM,))

    return end(scan(body, batch["x"], (p["a"], keys)))


def mask_made_in_the_body(p, batch):
    def body(x, layer):
        mask = jnp.tril(jnp.ones((DIM, DIM)))
        return dense(x @ mask, layer)

    return end(scan(body, batch["x"], p["a"]))


def layers_that_do_not_all_shard(p, batch):
    body = lambda x, layer: jnp.tanh(x @ layer["w"]) * layer["gain"].mean()
    return end(scan(body, batch["x"], p["odd"]))


def vmapped(p, batch):
    return end(jax.vmap(lambda x: scan(dense, x, p["a"]))(batch["x"]))


def psum_in_the_loss(p, batch):
    x = scan(dense, batch["x"], p["a"])
    if "data" in jax.sharding.get_abstract_mesh().manual_axes:
        return end(lax.pmean(x.mean(0), "data"))
    return end(x.mean(0))


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "all_but_names": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


def constant_outputs(p, batch):
    def body(x, layer):
        return dense(x, layer), (True, 3)

    x, (flags, _) = lax.scan(jax.checkpoint(body), batch["x"], p["a"])
    return end(x) * flags.all().astype(x.dtype)


def two_encoders(p, batch):
    encode = jax.checkpoint(lambda x, a: scan(jax.checkpoint(dense), x, a))
    return end(encode(batch["x"], p["a"]) * encode(batch["x"] * 2, p["a"]))


def wider_before_the_scan(p, batch):
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p["a"])
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), narrow)
    return end(scan(dense, batch["x"], wide))


def halves(p, batch):
    encoder, decoder = (jax.tree.map(lambda a, at=at: a[at : at + 2], p["a"]) for at in (0, 2))
    return end(scan(dense, scan(dense, batch["x"], encoder), decoder))


def split_and_flipped(p, batch):
    first, second = jax.tree.transpose(
        jax.tree.structure(p["a"]), None, jax.tree.map(lambda a: jnp.split(a[::-1], 2), p["a"])
    )
    return end(scan(dense, scan(dense, batch["x"], first), second))


def unstacked(p, batch):
    x = batch["x"]
    for w, b in zip(p["a"]["w"].astype(jnp.bfloat16), p["a"]["b"], strict=True):
        x = dense(x, {"w": w.astype(jnp.float32), "b": b})
    return end(x)


def frozen_where_used_once(p, batch):
    frozen = lax.stop_gradient({"a": p["a"], "shared": p["shared"]})
    grouped = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), frozen["a"])
    x = scan(lambda x, group: scan(dense, x, group), batch["x"], grouped)
    return end(
        scan(
            dense,
            x @ frozen["shared"],
            jax.tree.map(lambda v: v, {"w": p["c"]["w"][:, :, :DIM], "b": p["c"]["v"][:, 0]}),
        )
    )  # cut dimensions: whole


def frozen_inside(p, batch):
    body = lambda x, layer: dense(x, {"w": lax.stop_gradient(layer["w"]), "b": layer["b"]})
    return end(scan(body, batch["x"], p["a"]))


def fully_unrolled(p, batch):
    return end(scan(jax.checkpoint(dense), batch["x"], p["a"], unroll=True))


PROGRAMS = {
    f.__name__: f
    for f in (
        plain_scan, reverse_unrolled_scan, scan_with_outputs, several_stacks,
        constants_with_gradients, groups_of_layers, groups_under_remat, remat_in_the_middle,
        remat_around_the_scan, jitted_inside, call_returns_what_it_got, control_flow_inside,
        custom_derivative_inside, weight_normalisation, mixed_dtypes, frozen_layers,
        tied_everywhere, python_loop, recurrent, weights_in_the_carry, dropout_keys,
        mask_made_in_the_body, layers_that_do_not_all_shard, vmapped, psum_in_the_loss,
        constant_outputs, two_encoders, wider_before_the_scan, fully_unrolled, halves,
        split_and_flipped, unstacked, frozen_where_used_once, frozen_inside,
    )
}  # fmt: skip
PROGRAMS |= {f"remat_{k}": functools.partial(remat_body, v) for k, v in POLICIES.items()}


def sharded_grad(loss, stage, **options):
    plan = zerojax.plan({"params": PARAMS}, stage=stage, mesh=make_mesh(), min_shard_size=1)
    params = plan.place({"params": PARAMS})["params"]
    return jax.jit(zerojax.value_and_grad(loss, plan, **options)), params


NARROW = {"mixed_dtypes", "wider_before_the_scan", "unstacked"}  # bfloat16 somewhere


# Stage 2 is the same engine with weights that are there already: a program of each kind tells.
AT_STAGE_2 = {"plain_scan", "remat_in_the_middle", "tied_everywhere", "frozen_layers", "halves"}


@pytest.mark.parametrize(
    ("name", "stage", "prefetch"),
    mostly_slow(
        [(name, *case) for name in PROGRAMS for case in ((2, 0), (3, 0), (3, 1))],
        lambda name, stage, prefetch: stage == 3 or name in AT_STAGE_2,
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
    assert gathered <= 2 * reduced
    assert reduced <= sum(x.size for x in jax.tree.leaves(PARAMS))
    assert not [c for c in found if c.kind == "all-reduce" and c.elements > DIM]


def scan_residuals(jaxpr, least):
    """Shapes of what forward loops stack up, from `least` elements a layer on."""
    found = []
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS:
            # Loops that prefetch have a layer of forward, two of backward, outside.
            lengths = (LAYERS, LAYERS - 1, LAYERS - 2)
            shapes = [v.aval.shape for v in eqn.outvars]
            stacked = [shape for shape in shapes if shape and shape[0] in lengths]
            found += [s for s in stacked if math.prod(s[1:]) >= least]
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += scan_residuals(inner, least)
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "name", ["plain_scan", "weight_normalisation", "mixed_dtypes", "mask_made_in_the_body",
             "remat_everything", "remat_all_but_names", "remat_in_the_middle"],
)  # fmt: skip
def test_no_loop_keeps_full_weights(name, stage):
    """Activations have 2 rows here (16 examples on 8 devices), so a weight is easy to tell."""
    grad, params = sharded_grad(PROGRAMS[name], stage)
    kept = scan_residuals(grad.trace(params, BATCH).jaxpr, least=DIM * DIM)
    assert kept == []


@pytest.mark.parametrize("name", ["plain_scan", "reverse_unrolled_scan", "remat_in_the_middle"])
def test_prefetch_gathers_one_layer_ahead_in_both_directions(name):
    grad, params = sharded_grad(PROGRAMS[name], 3, prefetch=1)
    jaxpr = grad.trace(params, BATCH).jaxpr
    gathers = [c for c in collectives(jaxpr) if c.kind == "all-gather"]
    layer = sum(x[0].size for x in jax.tree.leaves(PARAMS["a"]))
    # Each direction's first outside of its loop; backward begins with forward's last layer.
    assert sum(c.elements for c in gathers if c.depth == 0) == 2 * layer
    assert sum(c.moved for c in gathers) == (2 * LAYERS - 1) * layer
    for loop in scans_of(jaxpr):
        body = loop.params["jaxpr"].jaxpr
        made = {v: eqn.primitive.name for eqn in body.eqns for v in eqn.outvars}
        carried = body.outvars[: sum(_compat.scan_counts(loop.params)[1:])]
        # In forward the gather may still be wrapped in its custom derivative.
        assert sum(made.get(v) in ("all_gather", "custom_vjp_call") for v in carried) == 2


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("name", ["plain_scan", "remat_in_the_middle", "reverse_unrolled_scan"])
def test_prefetching_loops_scatter_what_the_turn_before_left(name, in_turn, monkeypatch):
    monkeypatch.setattr(_xla_options, "knows_wires", lambda mesh: in_turn)
    grad, params = sharded_grad(PROGRAMS[name], 3, prefetch=1)
    jaxpr = grad.trace(params, BATCH).jaxpr
    scatters = [c for c in collectives(jaxpr) if c.kind == "reduce-scatter"]
    layer = sum(x[0].size for x in jax.tree.leaves(PARAMS["a"]))
    assert sum(c.moved for c in scatters) == LAYERS * layer
    assert sum(c.elements for c in scatters if c.depth == 1) == layer
    _, backward = scans_of(jaxpr)
    body = backward.params["jaxpr"].jaxpr
    reduced = [e.invars[0] for e in body.eqns if e.primitive.name == "reduce_scatter"]
    assert len(reduced) == 2 and set(reduced) <= set(body.invars)
    # The next layer's weights may have to wait for that: its memory is free by then.
    made = {v: eqn.primitive.name for eqn in body.eqns for v in eqn.outvars}
    # A gather may still be wrapped in its custom derivative.
    names = ("all_gather", "custom_vjp_call")
    gathers = [e for e in body.eqns if e.primitive.name in names]
    assert len(gathers) == 2
    for gather in gathers:
        assert (made[gather.invars[0]] == "optimization_barrier") == in_turn


HEADED = {
    "layers": PARAMS["a"], "scale": jnp.ones(DIM), "head": PARAMS["c"]["w"][0],
    "down": PARAMS["c"]["v"][0], "bias": jnp.linspace(-1, 1, 2 * DIM),
}  # fmt: skip


def head(p, batch):
    x = scan(dense, batch["x"], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def tied_head(p, batch):
    x = scan(dense, p["head"].T[batch["t"]], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def head_after_remats(p, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.checkpoint(dense)(x, jax.tree.map(lambda a: a[i], p["layers"]))
    return end((x * p["scale"]) @ p["head"])


def two_heads(p, batch):
    """Together larger than the largest weight: the second one stays."""
    return end(scan(dense, batch["x"], p["layers"]) @ p["head"] @ p["down"])


def head_with_a_bias(p, batch):
    return end(scan(dense, batch["x"], p["layers"]) @ p["head"] + p["bias"])


def head_and_a_penalty(p, batch):
    return head(p, batch) + 1e-3 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


def small_layers_after_the_head(p, batch):
    """Only the last layer stays, however large the head is."""
    x = (batch["x"] @ p["head"])[:, :DIM]
    for i in range(LAYERS):
        x = dense(x, jax.tree.map(lambda a: a[i], p["layers"]))
    return end(x)


def computed_head(p, batch):
    """Its sine would stay too."""
    return end(scan(dense, batch["x"], p["layers"]) @ jnp.sin(p["head"]))


def frozen_head(p, batch):
    return head({**p, "head": jax.lax.stop_gradient(p["head"])}, batch)


def head_before_the_loop(p, batch):
    x = (batch["x"] * p["scale"]) @ p["head"] @ p["down"]
    return end(scan(dense, x, p["layers"]))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("loss", "used", "kept"),
    [(head, 1, 1), (tied_head, 1, 1), (head_after_remats, 1, 1), (two_heads, 2, 1),
     (head_before_the_loop, 2, 0), (head_with_a_bias, 1, 1), (head_and_a_penalty, 2, 1),
     (small_layers_after_the_head, 1, 0), (frozen_head, 1, 1),
     (computed_head, 1, 0)],
)  # fmt: skip
def test_prefetching_backward_starts_with_what_forward_read_last(loss, used, kept, prefetch):
    plan = zerojax.plan({"params": HEADED}, stage=3, mesh=make_mesh(), stacked="layers/")
    grad = jax.jit(zerojax.value_and_grad(loss, plan, prefetch=prefetch))
    params = plan.place({"params": HEADED})["params"]
    assert_close(grad(params, BATCH)[1], jax.grad(loss)(HEADED, BATCH), 1e-6)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    of_heads = [c for c in found if c.kind == "all-gather" and c.elements == 2 * DIM * DIM]
    assert len(of_heads) == 2 * used - kept * prefetch


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prefetch_in_short_loops(length, reverse):
    params = {"params": {"a": jax.tree.map(lambda a: a[:length], PARAMS["a"])}}

    def loss(p, batch):
        scale = jnp.arange(1.0, length + 1)  # an ordinary scanned input beside the weights
        body = lambda x, layer: (dense(x, layer[0]) * layer[1], x.mean())
        x, means = jax.lax.scan(body, batch["x"], (p["a"], scale), reverse=reverse)
        return end(x) + (means * scale).sum()

    plan = zerojax.plan(params, stage=3, mesh=make_mesh(), stacked="a/")
    grad = jax.jit(zerojax.value_and_grad(loss, plan, prefetch=1))
    got = grad(plan.place(params)["params"], BATCH)
    parts = [jax.tree.map(lambda a: a[i * 2 : i * 2 + 2], BATCH) for i in range(8)]
    want = jax.grad(lambda p: sum(loss(p, part) for part in parts) / 8)(params["params"])
    assert_close(got[1], want, 1e-6)


def test_on_cpus_loops_that_prefetch_are_unrolled():
    """XLA:CPU runs collectives that follow a loop in the midst of it: `mixes_up_collectives`."""
    grad, params = sharded_grad(PROGRAMS["plain_scan"], 3, prefetch=1)
    assert " while(" not in grad.lower(params, BATCH).compile().as_text()


@pytest.mark.slow
def test_prefetch_of_large_layers_on_cpus():
    """NaN or a segmentation fault on JAX 0.12, therefore in a process of its own."""
    command = [sys.executable, "-c", LARGE_LAYERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    plain, prefetched = map(float, done.stdout.split())
    assert prefetched == pytest.approx(plain, rel=1e-5)


LARGE_LAYERS = """
import jax, numpy as np, optax, zerojax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from flax.training.train_state import TrainState
from zerojax import _presets
model = _presets.Gpt(4, 256, 4, vocab=512, tokens=64, compute="float32")

def make_state():
    leaves, treedef = jax.tree.flatten(model.shapes())
    draw = lambda i, s: jax.random.normal(jax.random.key(i), s.shape) * 0.05
    params = treedef.unflatten([draw(i, s) for i, s in enumerate(leaves)])
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

batch = np.random.default_rng(0).integers(0, 512, (64, 64)).astype(np.int32)
plan = zerojax.plan(make_state, stage=3)
for prefetch in (0, 1):
    step = zerojax.train_step(model.loss, prefetch=prefetch)
    print(step(plan.place(make_state), batch)[1]["grad_norm"])
"""


def scans_of(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        else:
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from scans_of(inner)


@pytest.mark.parametrize("value", [2, -1, "yes", None])
def test_bad_prefetch(value):
    with pytest.raises(ValueError, match=r"prefetch must be 0, 1 or 'auto'"):
        zerojax.train_step(end, prefetch=value)


@pytest.mark.parametrize(
    ("name", "depths", "dtypes"),
    [
        ("two_encoders", {1}, {"float32"}),
        ("wider_before_the_scan", {1}, {"bfloat16"}),
        ("plain_scan", {1}, {"float32"}),
        ("groups_of_layers", {2}, {"float32"}),
        ("halves", {1}, {"float32"}),
        ("split_and_flipped", {1}, {"float32"}),
        ("python_loop", {0}, {"float32"}),
        ("unstacked", {0}, {"bfloat16", "float32"}),
    ],
)
def test_stacks_are_never_gathered_whole(name, depths, dtypes):
    grad, params = sharded_grad(PROGRAMS[name], 3)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    assert {c.depth for c in found if c.kind == "all-gather"} == depths
    assert max(c.elements for c in found if c.kind == "all-gather") == DIM * DIM
    assert {c.dtype for c in found if c.kind != "all-reduce"} == dtypes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_frozen_is_gathered_by_layers_and_not_reduced(stage, prefetch):
    grad, params = sharded_grad(frozen_where_used_once, stage, prefetch=prefetch)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    reduced = [c for c in found if c.kind == "reduce-scatter"]
    assert sum(c.moved for c in reduced) == sum(x.size for x in jax.tree.leaves(PARAMS["c"]))
    if stage == 3:
        frozen = [c for c in found if c.kind == "all-gather" and c.depth == 2]
        assert max(c.elements for c in frozen) == DIM * DIM
        # What is frozen and not in a loop: once each way.
        assert sum(c.elements == DIM * DIM for c in found if c.depth == 0) == 2

    grad, params = sharded_grad(frozen_inside, stage, prefetch=prefetch)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    assert sum(c.moved for c in found if c.kind == "reduce-scatter") == PARAMS["a"]["b"].size


def test_fully_unrolled_layers_are_gathered_again_in_backward():
    grad, params = sharded_grad(fully_unrolled, 3)
    assert sum(c.times for c in collectives(grad.trace(params, BATCH).jaxpr)
               if c.kind == "all-gather") == 2 * 2 * LAYERS  # fmt: skip
    times = 2 if KEEPS_BARRIERS else 1
    assert gathers_compiled(grad, params) == times * 2 * LAYERS


def test_prefetch_keeps_no_weights_of_nested_loops():
    grouped = jax.tree.map(lambda a: jnp.stack([a] * LAYERS), PARAMS["a"])
    loss = lambda p, b: end(scan(lambda x, g: scan(dense, x, g), b["x"], p))
    plan = zerojax.plan({"params": grouped}, stage=3, mesh=make_mesh(), stacked=".", overrides={
        "w": jax.sharding.PartitionSpec(None, None, "data"),
        "b": jax.sharding.PartitionSpec(None, None, "data"),
    })  # fmt: skip
    params = plan.place({"params": grouped})["params"]
    grad = jax.jit(zerojax.value_and_grad(loss, plan, prefetch=1))
    assert_close(grad(params, BATCH)[1], jax.grad(loss)(grouped, BATCH), 1e-6)
    assert scan_residuals(grad.trace(params, BATCH).jaxpr, least=DIM * DIM) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_prints_inside_loops_and_remats_still_happen(stage):
    seen = []

    def loss(params, batch):
        def body(x, layer):
            jax.debug.callback(lambda: seen.append("layer"))
            return dense(x, layer)

        def quiet(x, w):
            jax.debug.callback(lambda: seen.append("remat"))
            return x @ w

        jax.checkpoint(quiet)(batch["x"], params["shared"])  # its output is not used
        return end(scan(body, batch["x"], params["a"]))

    plan = zerojax.plan({"params": PARAMS}, stage=stage, mesh=make_mesh())
    params = plan.place({"params": PARAMS})["params"]
    jax.block_until_ready(jax.jit(zerojax.value_and_grad(loss, plan))(params, BATCH))
    jax.effects_barrier()
    # How often XLA calls back for each device is its own affair.
    assert seen.count("layer") >= LAYERS and seen.count("remat") >= 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_complex_parameters_keep_their_imaginary_parts(stage):
    params = {"w": (PARAMS["shared"] + 1j * PARAMS["single"]["w"]).astype(jnp.complex64)}
    loss = lambda p, b: jnp.mean(jnp.abs(b["x"] @ p["w"]) ** 2)
    plan = zerojax.plan({"params": params}, stage=stage, mesh=make_mesh())
    precision = zerojax.Precision(reduce="float32")
    placed = plan.place({"params": params})["params"]
    _, grads = zerojax.value_and_grad(loss, plan, precision=precision)(placed, BATCH)
    np.testing.assert_allclose(grads["w"], jax.grad(loss)(params, BATCH)["w"], atol=1e-6)


def test_regather_false_gathers_once_and_keeps():
    grad, params = sharded_grad(plain_scan, 3, regather=False)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    size = sum(x.size for x in jax.tree.leaves(PARAMS["a"]))
    assert sum(c.moved for c in found if c.kind == "all-gather") == size


# XLA:CPU of JAX 0.10 drops optimization barriers, and jax.checkpoint's with them. XLA:GPU of
# both versions keeps them.
KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)


def gathers_compiled(grad, params):
    assert "optimization_barrier" in grad.lower(params, BATCH).as_text()
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
    again = LAYERS - 1 if KEEPS_BARRIERS else 0
    assert gathers_compiled(grad, params) == 2 * LAYERS + again
    assert_close(grad(params, BATCH)[1], jax.grad(loss)(layers, BATCH), 1e-6)


def test_stack_sharded_along_its_layers_is_gathered_whole_with_a_warning():
    params = {"w": jnp.ones((8, DIM, DIM)) / DIM}  # one leaf alone: not known for a stack
    loss = lambda p, batch: end(scan(lambda x, w: x @ w, batch["x"], p["w"]))
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh())
    assert plan.leaves[0].dim == 0
    placed = plan.place({"params": params})["params"]
    with pytest.warns(UserWarning, match=r"stacked='<its path>'"):
        _, grads = zerojax.value_and_grad(loss, plan)(placed, BATCH)
    assert_close(grads, jax.grad(loss)(params, BATCH), 1e-6)
    named = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), stacked="w$")
    assert named.leaves[0].dim == 1
    _, grads = zerojax.value_and_grad(loss, named)(named.place({"params": params})["params"], BATCH)
    assert_close(grads, jax.grad(loss)(params, BATCH), 1e-6)


def test_integer_parameters_pass_through():
    params = {"w": PARAMS["single"]["w"], "perm": jnp.arange(DIM)[::-1]}
    loss = lambda p, batch: end(batch["x"][:, p["perm"]] @ p["w"])
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1)
    _, grads = zerojax.value_and_grad(loss, plan)(plan.place({"params": params})["params"], BATCH)
    assert_close(grads["w"], jax.grad(loss, allow_int=True)(params, BATCH)["w"], 1e-6)
    assert grads["perm"].dtype == jnp.int32 and not np.any(grads["perm"])


def test_linen_scan_is_a_layer_loop():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(DIM)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True},
                length=LAYERS,
            )  # fmt: skip
            return scanned()(x, None)[0]

    model = Stack()
    params = model.init(jax.random.key(0), BATCH["x"])
    loss = lambda p, batch: end(model.apply(p, batch["x"]))
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1)
    assert {leaf.dim for leaf in plan.params} == {1}
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    placed = plan.place({"params": params})["params"]
    assert_close(grad(placed, BATCH)[1], jax.grad(loss)(params, BATCH), 1e-6)
    found = list(collectives(grad.trace(placed, BATCH).jaxpr))
    assert {c.depth for c in found if c.kind != "all-reduce"} == {1}
