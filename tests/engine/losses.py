"""Losses of every shape, each written for one device, and their gradients on eight."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import zerojax
from tests.conftest import make_mesh
from tests.support.collectives import scans_of
from tests.support.schedules import value_and_grad

LAYERS, DIM = 4, 16
draw = np.random.default_rng(0)


def normal(*shape):
    return draw.normal(size=shape).astype("f") / DIM**0.5


PARAMS = {
    "a": {"w": normal(LAYERS, DIM, DIM), "b": normal(LAYERS, DIM)},
    "c": {"w": normal(LAYERS, DIM, 2 * DIM), "v": normal(LAYERS, 2 * DIM, DIM)},
    "shared": normal(DIM, DIM),
    "table": normal(32, DIM),
    "single": {"w": normal(DIM, DIM)},
    "odd": {"w": normal(LAYERS, DIM, DIM), "gain": 1 + normal(LAYERS, 3)},
}
BATCH = {"x": 4 * normal(16, DIM), "t": draw.integers(0, 5, 16).astype("int32")}


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


def weights_in_the_carry(p, batch):
    def body(carry, _):
        x, w = carry
        return (jnp.tanh(x @ w), w * 0.9), None

    (x, _), _ = lax.scan(body, (batch["x"], p["shared"]), None, length=3)
    return end(x)


def layers_that_do_not_all_shard(p, batch):
    body = lambda x, layer: jnp.tanh(x @ layer["w"]) * layer["gain"].mean()
    return end(scan(body, batch["x"], p["odd"]))


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
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
    cut = {"w": p["c"]["w"][:, :, :DIM], "b": p["c"]["v"][:, 0]}  # so they are gathered whole
    return end(scan(dense, x @ frozen["shared"], cut))


def frozen_inside(p, batch):
    body = lambda x, layer: dense(x, {"w": lax.stop_gradient(layer["w"]), "b": layer["b"]})
    return end(scan(body, batch["x"], p["a"]))


def frozen_in_a_while_loop(p, batch):
    """JAX cannot differentiate such a loop; here nothing in it has a gradient."""
    w = lax.stop_gradient(p["shared"]) * (p["shared"] > 0).astype("float32")
    turn = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ w))
    _, x = lax.while_loop(lambda carry: carry[0] < 2, turn, (0, batch["x"]))
    return end(x @ p["shared"])


def writes_to_a_ref(p, batch):
    """All layers of the stack are gathered at once: JAX differentiates this loop itself."""
    hidden = jax.new_ref(jnp.zeros((LAYERS, *batch["x"].shape)))

    def body(x, layer_and_number):
        layer, number = layer_and_number
        hidden[number] = dense(x, layer)
        return hidden[number], None

    lax.scan(body, batch["x"], (p["a"], jnp.arange(LAYERS)))
    return end(hidden[...])


PROGRAMS = {
    f.__name__: f
    for f in (
        plain_scan, reverse_unrolled_scan, scan_with_outputs,
        constants_with_gradients, groups_of_layers, groups_under_remat, remat_in_the_middle,
        jitted_inside, call_returns_what_it_got, control_flow_inside,
        custom_derivative_inside, weight_normalisation, frozen_layers,
        tied_everywhere, python_loop, weights_in_the_carry,
        layers_that_do_not_all_shard,
        constant_outputs, two_encoders, wider_before_the_scan,
        split_and_flipped, unstacked, frozen_where_used_once, frozen_inside,
        frozen_in_a_while_loop, writes_to_a_ref,
    )
}  # fmt: skip
PROGRAMS |= {f"remat_{k}": functools.partial(remat_body, v) for k, v in POLICIES.items()}


@functools.cache
def plan_of(stage, devices):
    """Seven devices divide no dimension: all parameters rest padded."""
    mesh = make_mesh(devices)
    return zerojax.plan({"params": PARAMS}, stage=stage, mesh=mesh, min_shard_size=1)


def sharded_grad(loss, stage=3, devices=8, **options):
    """Takes the loss and the gradients of placed parameters, for a batch."""
    loss = PROGRAMS.get(loss, loss)
    return value_and_grad(loss, plan_of(stage, devices), **options)


def placed(stage=3, devices=8):
    return plan_of(stage, devices).place({"params": PARAMS})["params"]


@functools.cache
def traced(loss, stage=3, devices=8, **options):
    """The jaxpr of a loss, or of that of a name, and its gradients."""
    params = plan_of(stage, devices).abstract()["params"]
    return jax.make_jaxpr(sharded_grad(loss, stage, devices, **options))(params, rows_for(devices))


def rows_for(devices):
    return jax.tree.map(lambda x: x[: 2 * devices], BATCH)


def each(functions, *args):
    """What functions return, by name. One program has all of them, as branches of one switch: XLA
    compiles it in less time than one for each."""
    run = jax.jit(lambda at, *args: lax.switch(at, list(functions.values()), *args))
    return {name: jax.device_get(run(at, *args)) for at, name in enumerate(functions)}


def kept_by_loops(jaxpr, least):
    """How many loops over layers there are, and the shapes of what they stack up: those with at
    least that many elements a layer."""
    # Loops that prefetch have a layer of forward, two of backward, outside.
    lengths = (LAYERS, LAYERS - 1, LAYERS - 2)
    loops = [eqn for eqn in scans_of(jaxpr, nested=True) if eqn.params["length"] in lengths]
    shapes = [v.aval.shape for loop in loops for v in loop.outvars]
    stacked = [shape for shape in shapes if shape and shape[0] in lengths]
    return len(loops), [shape for shape in stacked if math.prod(shape[1:]) >= least]
