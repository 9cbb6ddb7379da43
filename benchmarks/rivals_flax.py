"""Rivals as Flax's guides teach them: FSDP by metadata on parameters of linen and nnx modules.

Both write the GPT of `zerojax.tools._forecast.presets` with Flax's own layers. They constrain each
block's input and output ("blocks"), which the guides call optional, or nothing.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from rivals import accumulated

from zerojax.tools._forecast import presets as _presets

TX = optax.adamw(1e-4)
KEPT = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def refuse_others(model, remat):
    """Raises for options that these modules would silently ignore."""
    if type(model) is not _presets.Gpt:  # Llama is a subclass
        raise ValueError(f"Flax's modules are a GPT here, and {type(model).__name__} is not")
    if remat not in KEPT:
        raise ValueError(f"Flax's modules have remat {', '.join(KEPT)}, not {remat!r}")


def held(x, mesh, constrain):
    if not constrain:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))


def attended(qkv, heads):
    rows, tokens, _ = qkv.shape
    q, k, v = jnp.split(qkv.reshape(rows, tokens, 3 * heads, -1), 3, axis=2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, tokens, -1)


def dtypes(model):
    return {"dtype": model.compute, "param_dtype": jnp.float32}


def cross_entropy(logits, tokens):
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# -- linen


def dense(features, axis, **dtypes):
    names = ("data", None) if axis == 0 else (None, "data")
    init = nn.with_partitioning(nn.initializers.normal(0.02), names)
    return nn.Dense(features, use_bias=False, kernel_init=init, **dtypes)


class LinenBlock(nn.Module):
    model: object
    mesh: jax.sharding.Mesh
    constrain: bool

    @nn.compact
    def __call__(self, x, _):
        x, width = held(x, self.mesh, self.constrain), x.shape[-1]
        norm = functools.partial(nn.LayerNorm, use_bias=False, **dtypes(self.model))
        linear = functools.partial(dense, **dtypes(self.model))
        x = x + linear(width, 1)(attended(linear(3 * width, 0)(norm()(x)), self.model.heads))
        x = x + linear(width, 1)(jax.nn.gelu(linear(4 * width, 0)(norm()(x))))
        return held(x, self.mesh, self.constrain), None


class LinenGpt(nn.Module):
    model: object
    mesh: jax.sharding.Mesh
    remat: str
    constrain: bool

    @nn.compact
    def __call__(self, tokens):
        model = self.model
        init = nn.with_partitioning(nn.initializers.normal(0.02), (None, "data"))
        embed = nn.Embed(model.vocab, model.hidden, embedding_init=init, **dtypes(model))
        position = self.param("pos", init, (model.tokens, model.hidden))
        x = embed(tokens) + position.astype(model.compute)
        blocks = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False, policy=KEPT[self.remat]),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=model.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )  # fmt: skip
        x, _ = blocks(model, self.mesh, self.constrain)(x, None)
        return embed.attend(nn.LayerNorm(use_bias=False, **dtypes(model))(x))


def linen_step(constrain, model, mesh, remat, accumulate):
    refuse_others(model, remat)
    module = LinenGpt(model, mesh, remat, constrain == "blocks")

    def make_state():
        tokens = jnp.zeros((1, model.tokens), jnp.int32)
        params = module.init(jax.random.key(0), tokens)["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=TX)

    boxed = jax.eval_shape(make_state)
    shardings = nn.get_sharding(boxed, mesh)
    loss_of = lambda p, tokens: cross_entropy(module.apply({"params": p}, tokens), tokens)
    held = lambda grads: jax.lax.with_sharding_constraint(grads, shardings.params)
    gradients = accumulated(jax.value_and_grad(loss_of), accumulate, held)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state, tokens):
        loss, grads = gradients(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)

    def place(x, sharding):
        struct = nn.meta.unbox(x)
        struct = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        return x.replace_boxed(struct) if is_box(x) else struct

    return step, jax.tree.map(place, boxed, shardings, is_leaf=is_box)


# -- nnx


def linear(size, features, axis, rngs, **dtypes):
    names = ("data", None) if axis == 0 else (None, "data")
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), names)
    return nnx.Linear(size, features, use_bias=False, kernel_init=init, rngs=rngs, **dtypes)


class NnxBlock(nnx.Module):
    def __init__(self, model, rngs):
        self.heads, width = model.heads, model.hidden
        made = {"rngs": rngs, **dtypes(model)}
        self.norm1, self.norm2 = (nnx.LayerNorm(width, use_bias=False, **made) for _ in range(2))
        self.qkv, self.proj = linear(width, 3 * width, 0, **made), linear(width, width, 1, **made)
        self.up = linear(width, 4 * width, 0, **made)
        self.down = linear(4 * width, width, 1, **made)

    def __call__(self, x):
        x = x + self.proj(attended(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class NnxGpt(nnx.Module):
    def __init__(self, model, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "data"))
        made = {"rngs": rngs, **dtypes(model)}
        self.compute = model.compute
        self.embed = nnx.Embed(model.vocab, model.hidden, embedding_init=init, **made)
        self.pos = nnx.Param(init(rngs.params(), (model.tokens, model.hidden), jnp.float32))

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def blocks(rngs):
            return NnxBlock(model, rngs)

        self.blocks = blocks(rngs)
        self.norm = nnx.LayerNorm(model.hidden, use_bias=False, **made)

    def __call__(self, tokens, mesh, remat, constrain):
        x = self.embed(tokens) + self.pos.astype(self.compute)
        graph, stack = nnx.split(self.blocks)

        @functools.partial(jax.checkpoint, prevent_cse=False, policy=KEPT[remat])
        def body(x, layer):
            x = nnx.merge(graph, layer)(held(x, mesh, constrain))
            return held(x, mesh, constrain), None

        x, _ = jax.lax.scan(body, x, stack)
        return self.embed.attend(self.norm(x))


def nnx_step(constrain, model, mesh, remat, accumulate):
    refuse_others(model, remat)
    if accumulate > 1:
        raise ValueError("flax nnx is written without microbatches here: take flax linen")

    def make():
        gpt = NnxGpt(model, nnx.Rngs(0))
        return gpt, nnx.Optimizer(gpt, TX, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        graph, boxed = nnx.split(nnx.eval_shape(make))
        shardings = nnx.get_named_sharding(boxed, mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state, tokens):
        gpt, optimizer = nnx.merge(graph, state)
        logits = lambda gpt: gpt(tokens, mesh, remat, constrain == "blocks")
        loss_of = lambda gpt: cross_entropy(logits(gpt), tokens)
        loss, grads = nnx.value_and_grad(loss_of)(gpt)
        optimizer.update(gpt, grads)
        return nnx.state((gpt, optimizer)), loss

    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return step, jax.tree.map(place, boxed, shardings)


STEPS = {
    f"{name}, {constrain}": functools.partial(step, constrain)
    for name, step in {"flax linen": linen_step, "flax nnx": nnx_step}.items()
    for constrain in ("blocks", "nothing")
}
