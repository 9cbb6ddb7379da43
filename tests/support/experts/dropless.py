"""Experts that take every row that chooses them: rows are sorted by expert, and multiplied in
groups."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.support.experts import table as _e
from tests.support.experts.table import EXPERTS, HIDDEN, Case, case, swiglu
from tests.support.sequences.table import DIM


def best(logits, top):
    """The softmax over those that are chosen."""
    values, chosen = jax.lax.top_k(logits, top)
    return jax.nn.softmax(values), chosen


def mixed(p, x, weight, chosen, matmul=jax.lax.ragged_dot, drop=lambda h: h):
    """Each row takes part as often as it chooses experts."""
    flat, top = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=p["router"].shape[-1])
    rows = flat[order // top]
    hidden = jax.nn.silu(matmul(rows, p["w1"], sizes)) * matmul(rows, p["w3"], sizes)
    y = matmul(drop(hidden), p["w2"], sizes)
    y = y[jnp.argsort(order)].reshape(*weight.shape, -1)
    return jnp.sum(y * weight[..., None].astype(y.dtype), axis=-2).reshape(x.shape)


def feed_forward(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


SHARED = {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}

# -- of published models


@case(r"/w\d")
def mixtral() -> Case:
    """In layers that a step may roll up."""
    mixture = lambda p, x: mixed(p, x, *best(x @ p["router"], 2))
    return _e.language_model(mixture, swiglu(), attends=True, layers=3)


@case(r"/w\d", close=2e-2)
def mixtral_bf16() -> Case:
    """The router stays in 32 bits."""

    def mixture(p, x):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        y = mixed(low, x.astype(jnp.bfloat16), *best(x @ p["router"], 2))
        return y.astype(jnp.float32)

    return _e.language_model(mixture, swiglu())


@case(r"/w\d")
def one_expert_takes_all() -> Case:
    """No row chooses another first, and nearly none another second."""

    def mixture(p, x):
        favour = 9.0 * (jnp.arange(EXPERTS) == 2) + 4.0 * (jnp.arange(EXPERTS) == 3)
        return mixed(p, x, *best(x @ p["router"] + favour, 2))

    return _e.language_model(mixture, swiglu())


@case("gate_up|down")
def qwen3() -> Case:
    """Many experts, two weights of one in one array, stacked layers, and a balancing loss over the
    device's rows."""
    experts, top = 12, 4

    def mixture(p, x):
        probs = jax.nn.softmax((x @ p["router"]).reshape(-1, experts))
        weight, chosen = jax.lax.top_k(probs, top)
        weight = weight / weight.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.ravel(), stable=True)
        sizes = jax.nn.one_hot(chosen.ravel(), experts, dtype=jnp.int32).sum(0)
        rows = jnp.repeat(x.reshape(-1, DIM), top, axis=0)[order]
        gate, up = jnp.split(jax.lax.ragged_dot(rows, p["gate_up"], sizes), 2, -1)
        rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        y = jnp.zeros_like(rows).at[order].set(rows).reshape(-1, top, DIM)
        share = jax.nn.one_hot(chosen, experts).sum(1).mean(0)
        balance = experts * jnp.sum(jax.lax.stop_gradient(share) * probs.mean(0))
        return jnp.einsum("tkd,tk->td", y, weight).reshape(x.shape), balance

    shapes = {"gate_up": (experts, DIM, 2 * HIDDEN), "down": (experts, HIDDEN, DIM)}
    shapes |= {"router": (DIM, experts)}
    return _e.language_model(mixture, shapes, attends=True, scanned=jax.checkpoint)


@case(r"/w\d")
def deepseek_v3() -> Case:
    """Experts in groups, of which a token takes the two best; a bias that has no gradient takes
    part in the choice; a shared expert."""
    experts, groups, top = 12, 4, 3

    def mixture(p, x):
        scores = jax.nn.sigmoid(x.reshape(-1, DIM) @ p["router"])
        biased = jax.lax.stop_gradient(scores + p["bias"])
        grouped = biased.reshape(-1, groups, experts // groups)
        _, best_groups = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), 2)
        allowed = jax.nn.one_hot(best_groups, groups).sum(-2)[..., None] > 0
        _, chosen = jax.lax.top_k(jnp.where(allowed, grouped, -jnp.inf).reshape(-1, experts), top)
        weight = jnp.take_along_axis(scores, chosen, axis=-1)
        weight = 2.5 * weight / (weight.sum(-1, keepdims=True) + 1e-20)
        return mixed(p, x, weight, chosen) + feed_forward(p, x)

    return _e.language_model(mixture, swiglu(experts) | SHARED | {"bias": (experts,)})


@case(r"/w\d")
def llama4() -> Case:
    """One expert for a token, whose input has the gate, beside a shared one."""

    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        gate, chosen = jax.lax.top_k(flat @ p["router"], 1)
        y = mixed(p, flat * jax.nn.sigmoid(gate), jnp.ones_like(gate), chosen)
        return feed_forward(p, x) + y.reshape(x.shape)

    def scanned(body):
        return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)

    return _e.language_model(mixture, swiglu() | SHARED, scanned=scanned)


@case("w_|b_", "gather")
def gpt_oss() -> Case:
    """Gates and values alternate; of biases, each row takes that of its expert."""

    def mixture(p, x):
        weight, chosen = best(x.reshape(-1, DIM) @ p["router"], 2)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=EXPERTS)
        expert = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=order.size)
        rows = jnp.take(x.reshape(-1, DIM), order // 2, axis=0)
        hidden = jax.lax.ragged_dot(rows, p["w_up"], sizes) + p["b_up"][expert]
        gate, up = jnp.minimum(hidden[:, ::2], 3), jnp.clip(hidden[:, 1::2], -3, 3)
        hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        y = jax.lax.ragged_dot(hidden, p["w_down"], sizes) + p["b_down"][expert]
        y = y * weight.reshape(-1)[order][:, None]
        return jax.ops.segment_sum(y, order // 2, x.shape[0] * x.shape[1]).reshape(x.shape)

    shapes = {"w_up": (EXPERTS, DIM, 2 * HIDDEN), "w_down": (EXPERTS, HIDDEN, DIM)}
    shapes |= {"b_up": (EXPERTS, 2 * HIDDEN), "b_down": (EXPERTS, DIM), "router": (DIM, EXPERTS)}
    return _e.language_model(mixture, shapes)


@case(r"/w\d")
def maxtext_sparse() -> Case:
    """Sorts with a derivative of its own, pads rows to whole tiles, and saves what has names."""
    top, tile = 2, 32

    @jax.custom_vjp
    def taken(x, index):
        return x[index]

    taken.defvjp(lambda x, index: (x[index], index), lambda index, g: (g[jnp.argsort(index)], None))

    def mixture(p, x):
        weight, chosen = best(x @ p["router"], top)
        order = jnp.argsort(jnp.ravel(chosen))
        rows = taken(jnp.repeat(x.reshape(-1, DIM), top, axis=0), order)
        sizes = jnp.bincount(jnp.ravel(chosen), length=EXPERTS)

        def matmul(rows, kernel):
            padded = jax.lax.pad(rows, 0.0, [(0, -len(rows) % tile, 0), (0, 0, 0)])
            y = jax.lax.ragged_dot(padded, kernel, sizes, preferred_element_type=x.dtype)
            return y[: len(rows)]

        gate = checkpoint_name(matmul(rows, p["w1"]), "mlpwi_0")
        up = checkpoint_name(matmul(rows, p["w3"]), "mlpwi_1")
        y = checkpoint_name(matmul(jax.nn.silu(gate) * up, p["w2"]), "mlpwo")
        y = taken(y, jnp.argsort(order)).reshape(-1, top, DIM)
        return jnp.einsum("BKE,BK -> BE", y, weight.reshape(-1, top)).reshape(x.shape)

    policy = jax.checkpoint_policies.save_only_these_names("mlpwi_0", "mlpwi_1")
    scanned = lambda body: jax.checkpoint(body, policy=policy, prevent_cse=False)
    return _e.language_model(mixture, swiglu(), scanned=scanned)


# -- adapters, dropout, noise


def adapted(p, x):
    """A frozen weight of each expert, plus the product of two narrow ones."""

    def matmul(rows, w, sizes):
        low = jax.lax.ragged_dot(rows, w["a"], sizes)
        return jax.lax.ragged_dot(rows, w["base"], sizes) + jax.lax.ragged_dot(low, w["b"], sizes)

    p = p | {f"w{n}": {k: p[f"{k}{n}"] for k in ("base", "a", "b")} for n in (1, 2, 3)}
    return mixed(p, x, *best(x @ p["router"], 2), matmul)


@case(r"/(base|a|b)\d")
def lora() -> Case:
    shapes, rank, hidden = {"router": (DIM, EXPERTS)}, 4, 32  # rows of 32 fill a block of codes
    for n, wide, out in ((1, DIM, hidden), (2, hidden, DIM), (3, DIM, hidden)):
        shapes |= {f"base{n}": (EXPERTS, wide, out), f"a{n}": (EXPERTS, wide, rank)}
        shapes |= {f"b{n}": (EXPERTS, rank, out)}
    case = _e.language_model(adapted, shapes, scanned=lambda body: body)
    return dataclasses.replace(case, frozen="/base")


@case(r"/(base|a|b)\d")
def qlora() -> Case:
    """Of two weights of three, the rows are long enough."""
    return dataclasses.replace(lora(), codes="int8")


@case(r"/w\d")
def dropout_in_experts() -> Case:
    def mixture(p, x, rng):
        drop = lambda h: jnp.where(jax.random.bernoulli(rng, 0.8, h.shape), h / 0.8, 0)
        return mixed(p, x, *best(x @ p["router"], 2), drop=drop)

    return _e.language_model(mixture, swiglu(), noisy=True)


@case(r"/w\d")
def noisy_choice() -> Case:
    """Noise that a second router scales; a loss of the coefficient of variation of weights."""

    def mixture(p, x, rng):
        noise = jax.random.normal(rng, (*x.shape[:2], EXPERTS))
        weight, chosen = best(x @ p["router"] + noise * jax.nn.softplus(x @ p["noise"]), 2)
        gates = jnp.einsum("btk,btke->e", weight, jax.nn.one_hot(chosen, EXPERTS))
        return mixed(p, x, weight, chosen), gates.var() / gates.mean() ** 2

    return _e.language_model(mixture, swiglu() | {"noise": (DIM, EXPERTS)}, noisy=True)
