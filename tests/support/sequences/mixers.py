"""What mixes tokens without attention: convolutions, sums, pooling, sorting, experts."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    ATTENTION,
    DIM,
    GATHERS,
    HIDDEN,
    LAYERS,
    ROWS,
    TOKENS,
    VOCAB,
    Case,
    case,
    hidden_states,
    language_model,
)

# -- convolutions and shifts


@case("a halo of 3 tokens")
def causal_convolution() -> Case:
    """Depthwise, padded to the left: that of Mamba."""

    def mix(p, x):
        y = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=DIM,
        )  # fmt: skip
        return jax.nn.silu(y) @ p["out"]

    return language_model(mix, kernel=(4, 1, DIM), out=(DIM, DIM))


@case("a halo of 4 tokens")
def dilated_convolution() -> Case:
    """WaveNet's, gated; each layer sees twice as far."""

    def loss(params, ids):
        x = params["embed"][ids]
        for i in range(LAYERS):
            p = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
            y = jax.lax.conv_general_dilated(
                x, p["kernel"], (1,), [(2 * 2**i, 0)], rhs_dilation=(2**i,),
                dimension_numbers=("NWC", "WIO", "NWC"),
            )  # fmt: skip
            a, b = jnp.split(y, 2, -1)
            x = x + (jnp.tanh(a) * jax.nn.sigmoid(b)) @ p["out"]
        return _t.next_token_loss(_t.norm(x, params["scale"]) @ params["embed"].T, ids)

    params = _t.transformer_params(kernel=(3, DIM, 2 * DIM), out=(DIM, DIM))
    return Case(params, loss, _t.tokens())


@case("halos of one token to both sides")
def same_convolution() -> Case:
    def mix(p, x):
        y = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jax.nn.gelu(y)

    def loss(params, batch):
        x = hidden_states(params, batch["x"], mix)
        return jnp.mean((x - batch["y"]) ** 2)

    shape = (ROWS, TOKENS, DIM)
    batch = {"x": _t.normal(*shape), "y": _t.normal(*shape, seed=1)}
    return Case(_t.transformer_params(kernel=(3, DIM, DIM)), loss, batch)


@case("a halo of one token")
def shift_by_pad() -> Case:
    """RWKV's token shift."""

    def mix(p, x):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return (x * p["now"] + before * p["before"]) @ p["out"]

    return language_model(mix, now=(DIM,), before=(DIM,), out=(DIM, DIM))


@case("a halo of one token")
def shift_by_concatenate() -> Case:
    def mix(p, x):
        before = jnp.concatenate([jnp.zeros_like(x[:, :2]), x[:, :-2]], axis=1)
        return jnp.concatenate([x, before], -1) @ p["out"]

    return language_model(mix, out=(2 * DIM, DIM))


@case("a halo of one token, round the end")
def shift_by_roll() -> Case:
    def mix(p, x):
        return jnp.roll(x, 1, axis=1) @ p["left"] + jnp.roll(x, -3, axis=1) @ p["right"]

    return language_model(mix, left=(DIM, DIM), right=(DIM, DIM))


@case("a halo of one token")
def differences() -> Case:
    """A loss of the change from token to token."""

    def loss(params, batch):
        x = hidden_states(params, batch["x"], _t.causal)
        target = jnp.diff(batch["x"], axis=1)
        return jnp.mean((x[:, 1:] - x[:, :-1] - target) ** 2)

    batch = {"x": _t.normal(ROWS, TOKENS, DIM)}
    return Case(_t.transformer_params(**ATTENTION), loss, batch)


@case("a token that is put in front")
def begin_token() -> Case:
    """Labels are what goes in, which a token for the beginning shifts."""

    def loss(params, ids):
        first = jnp.broadcast_to(params["begin"], (len(ids), 1, DIM))
        x = jnp.concatenate([first, params["embed"][ids[:, :-1]]], axis=1)
        logits = hidden_states(params, x, _t.causal) @ params["embed"].T
        labels = jax.nn.one_hot(ids, logits.shape[-1])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))

    return Case(_t.transformer_params(**ATTENTION) | _t.weights(begin=(1, DIM)), loss, _t.tokens())


# -- sums and scans


@case("sums of the blocks before")
def running_mean() -> Case:
    def mix(p, x):
        count = jnp.arange(1, x.shape[1] + 1)[:, None]
        return (jnp.cumsum(x, axis=1) / count) @ p["out"]

    return language_model(mix, out=(DIM, DIM))


@case("maxima of the blocks before")
def running_max() -> Case:
    def mix(p, x):
        top = jax.lax.cummax(x, axis=1)
        late = jax.lax.cumlogsumexp(x, axis=1, reverse=True)
        return top @ p["top"] + late @ p["late"]

    def loss(params, batch):
        return jnp.mean((hidden_states(params, batch, mix)) ** 2)

    params = _t.transformer_params(top=(DIM, DIM), late=(DIM, DIM))
    return Case(params, loss, _t.normal(ROWS, TOKENS, DIM))


# -- pooling


def pooling(pool):
    """A classifier of rows, whose tokens have passed one layer of attention."""

    def loss(params, batch):
        x = hidden_states(params, params["embed"][batch["ids"]], _t.causal)
        logits = pool(x, params) @ params["classes"]
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * batch["classes"], -1))

    classes = np.eye(5, dtype=np.float32)[_t.draw(4).integers(0, 5, ROWS)]
    params = _t.transformer_params(**ATTENTION) | _t.weights(classes=(DIM, 5), query=(DIM, 1))
    batch = {"ids": _t.tokens(), "classes": classes}
    specs = {"ids": jax.P("data", "sequence"), "classes": jax.P("data", None)}
    return Case(params, loss, batch, specs=specs)


@case("keys and values, a sum over tokens")
def mean_pooling() -> Case:
    return pooling(lambda x, params: x.mean(1))


@case("a maximum over tokens")
def max_pooling_with_ties() -> Case:
    """Tokens that stand twice in a row tie, and so do those below zero."""

    def loss(params, ids):
        x = jax.nn.relu(params["embed"][ids] @ params["up"])
        return jnp.mean((x.max(1) @ params["down"]) ** 2)

    params = _t.weights(embed=(VOCAB, DIM), up=(DIM, HIDDEN), down=(HIDDEN, DIM))
    return Case(params, loss, _t.tokens() % 7)


@case("keys and values, the spread over tokens")
def statistics_pooling() -> Case:
    return pooling(lambda x, params: x.std(1) + x.min(1))


@case("keys and values, a softmax over tokens")
def attention_pooling() -> Case:
    def pool(x, params):
        probs = jax.nn.softmax(x @ params["query"], axis=1)
        return (x * probs).sum(1)

    return pooling(pool)


@case("keys and values, the last token")
def last_token() -> Case:
    return pooling(lambda x, params: x[:, -1] + x[:, TOKENS // 2])


@case("keys and values, a maximum over tokens")
def argmax_over_tokens() -> Case:
    """The token with the highest score stands for its row."""

    def pool(x, params):
        at = jnp.argmax(x @ params["query"], axis=1)
        return jnp.take_along_axis(x, at[:, :, None], axis=1)[:, 0]

    return pooling(pool)


@case("keys and values, all scores", GATHERS)
def top_tokens() -> Case:
    """The mean of the 4 tokens with the highest scores: Perceiver-like pruning."""

    def pool(x, params):
        gate, at = jax.lax.top_k((x @ params["query"])[..., 0], 4)
        picked = jnp.take_along_axis(x, at[..., None], axis=1)
        return (picked * jax.nn.sigmoid(gate)[..., None]).mean(1)

    return pooling(pool)


@case("all tokens, sorted", GATHERS)
def sorted_tokens() -> Case:
    """Sliced quantiles of each feature."""

    def pool(x, params):
        return jnp.sort(x, axis=1)[:, ::6].mean(1)

    return pooling(pool)


@case("keys and values, all tokens in the frequency domain", GATHERS)
def spectrum() -> Case:
    """The loss compares what each row has of some frequencies, of which the batch has the waves."""

    def loss(params, batch):
        waves = jnp.abs(jnp.fft.rfft(batch["signal"], axis=1))[:, 1:6].mean(-1)
        x = hidden_states(params, batch["signal"] @ params["inside"], _t.causal)
        return jnp.mean((x.mean(1) @ params["waves"] - waves) ** 2)

    ends = _t.weights(inside=(3, DIM), waves=(DIM, 5))
    batch = {"signal": _t.normal(ROWS, TOKENS, 3)}
    return Case(_t.transformer_params(**ATTENTION) | ends, loss, batch)


@case("sums over tokens, by a matrix over them")
def mlp_mixer() -> Case:
    """Its weights have a dimension of tokens."""

    def mix(p, x):
        h = jax.nn.gelu(jnp.einsum("btd,ts->bsd", x, p["inside"]))
        return jnp.einsum("bsd,st->btd", h, p["outside"])

    return language_model(mix, inside=(TOKENS, 20), outside=(20, TOKENS))


# -- rules of their own


@case("keys and values")
def straight_through() -> Case:
    """Rounds states in the forward pass, by a `custom_vjp`; clips slopes on the way back."""

    @jax.custom_vjp
    def rounded(x, scale):
        return jnp.round(x * scale) / scale

    def forward(x, scale):
        return rounded(x, scale), (x, scale)

    def backward(kept, slope):
        x, scale = kept
        return jnp.where(jnp.abs(x) < 1.5, slope, 0), jnp.zeros_like(scale)

    rounded.defvjp(forward, backward)
    mix = lambda p, x: _t.causal(p, rounded(x, jnp.float32(4)))
    return language_model(mix, **ATTENTION)


@case("sums over tokens, in a derivative")
def learned_steps() -> Case:
    """Rounds weights and states to multiples of steps that are learned: LSQ."""

    @jax.custom_vjp
    def rounded(x, step):
        return jnp.round(x / step) * step

    def forward(x, step):
        return rounded(x, step), (x / step,)

    def backward(kept, slope):
        return slope, jnp.sum(slope * (jnp.round(kept[0]) - kept[0]))

    rounded.defvjp(forward, backward)

    def mix(p, x):
        steps = jax.nn.softplus(p["steps"]) / 4
        return rounded(x, steps[0]) @ rounded(p["out"], steps[1])

    return language_model(mix, out=(DIM, DIM), steps=(2,))


@case("a maximum over tokens, a sum over tokens")
def rule_over_tokens() -> Case:
    """A `custom_jvp` that mixes tokens: quantization by the largest state of each row."""

    @jax.custom_jvp
    def quantized(x):
        scale = jnp.abs(x).max(1, keepdims=True)
        return jnp.round(x / scale * 7) / 7 * scale

    @quantized.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        return quantized(x), dx - dx.mean(1, keepdims=True)

    return language_model(lambda p, x: quantized(x) @ p["out"], out=(DIM, DIM))


@case("nothing")
def physics() -> Case:
    """A network of points whose derivatives are in the loss: u'' = -u, and a value at the first."""

    def loss(params, batch):
        def u(x):
            h = jnp.tanh(x * params["first"][0] + params["shift"])
            return jnp.tanh(h @ params["second"]) @ params["last"][:, 0]

        points = batch["points"]
        second = jax.vmap(jax.vmap(jax.grad(jax.grad(u))))(points)
        equation = jnp.mean((second + jax.vmap(jax.vmap(u))(points)) ** 2)
        return equation + jnp.mean((jax.vmap(u)(points[:, 0]) - 1) ** 2)

    params = _t.weights(first=(1, DIM), shift=(DIM,), second=(DIM, DIM), last=(DIM, 1))
    return Case(params, loss, {"points": _t.draw().random((ROWS, TOKENS), np.float32)})


@case("distances between all pairs", GATHERS)
def atoms() -> Case:
    """Energies of pairs, and forces as their derivative, of which the loss is made."""

    def loss(params, batch):
        def energy(x):
            ago = x[:, :, None] - x[:, None]
            square = jnp.sum(ago**2, -1)
            off = ~jnp.eye(x.shape[1], dtype=bool)
            r = jnp.sqrt(jnp.where(off, square, 1.0))
            waves = jnp.exp(-((r[..., None] - params["centre"]) ** 2))
            pair = jnp.tanh(waves @ params["first"]) @ params["last"][:, 0]
            return jnp.sum(jnp.where(off, pair, 0))

        slope = jax.grad(energy)(batch["x"])
        return jnp.mean((slope + batch["forces"]) ** 2)

    params = _t.weights(centre=(6,), first=(6, 10), last=(10, 1))
    shape = (ROWS, TOKENS, 3)
    batch = {"x": _t.normal(*shape), "forces": _t.normal(*shape, seed=1)}
    return Case(params, loss, batch)


# -- experts


@case("keys and values")
def experts_by_token() -> Case:
    """The two best of 4 for each token, all of them computed."""

    def mix(p, x):
        weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        weight = weight / weight.sum(-1, keepdims=True)
        gates = jnp.sum(jax.nn.one_hot(chosen, 4) * weight[..., None], -2)
        h = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, p["inside"]))
        return jnp.einsum("bteh,ehd,bte->btd", h, p["outside"], gates) + _t.causal(p, x)

    expert = {"router": (DIM, 4), "inside": (4, DIM, 10), "outside": (4, 10, DIM)}
    return language_model(mix, **ATTENTION, **expert)


@case("places in experts, by a cumulative sum; what experts read")
def experts_with_capacity() -> Case:
    """Switch's: an expert takes the first 8 tokens of each row that choose it."""

    def mix(p, x, room=8):
        probs = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(probs.argmax(-1), 4)
        place = (jnp.cumsum(chosen, axis=1) * chosen).astype(int) - 1
        send = jax.nn.one_hot(place, room) * chosen[..., None]  # (rows, tokens, experts, places)
        inside = jnp.einsum("btec,btd->becd", send, x)
        h = jax.nn.relu(jnp.einsum("becd,edh->bech", inside, p["inside"]))
        outside = jnp.einsum("bech,ehd->becd", h, p["outside"])
        return jnp.einsum("btec,becd->btd", send * probs.max(-1)[..., None, None], outside)

    expert = {"router": (DIM, 4), "inside": (4, DIM, 10), "outside": (4, 10, DIM)}
    return language_model(mix, **expert)


@case("rows of tokens, sorted by expert", GATHERS)
def experts_by_sorting() -> Case:
    """Dropless: tokens are sorted by expert, and multiplied in groups."""

    def mix(p, x):
        flat = x.reshape(-1, DIM)
        probs = jax.nn.softmax(flat @ p["router"])
        chosen = probs.argmax(-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=4)
        h = jax.nn.gelu(jax.lax.ragged_dot(flat[order], p["inside"], sizes))
        y = jax.lax.ragged_dot(h, p["outside"], sizes)
        y = jnp.zeros_like(flat).at[order].set(y)
        return (y * probs.max(-1, keepdims=True)).reshape(x.shape)

    expert = {"router": (DIM, 4), "inside": (4, DIM, 10), "outside": (4, 10, DIM)}
    return language_model(mix, **expert)
