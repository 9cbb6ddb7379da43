"""Rivals that are packages: parallax, Keras and scalax, each as its documentation teaches it.

    python3.12 -m venv .venv/packages
    .venv/packages/bin/pip install -e . jax==0.12.0.1 flax==0.12.12 optax==0.2.8 \
        jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc nvidia-nvvm \
        google-parallax==0.0.2 keras==3.15.1 scalax==0.2.6
    .venv/packages/bin/python benchmarks/rivals_packages.py --json

Theirs: shardings, rematerialization where they have it, Keras' model, loss, optimizer and step.
Ours: the devices, which they take from a machine with GPUs, and shapes in place of arrays.
"""

import compiled  # before JAX: it says what JAX may look for

# isort: split
import functools
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import parallax
from compiled import figures, results, rivals, rivals_flax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from parallax.sharding import auto_shard, fsdp
from scalax import sharding as scalax

ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()
PACKAGES = ("jaxlib", "jax-cuda13-pjrt", "flax", "optax", "google-parallax", "keras", "scalax")


def refuse_others(model, remat, accumulate):
    rivals_flax.refuse_others(model, remat)
    if remat != "full" or accumulate > 1:
        raise ValueError("packages are written with full remat and without microbatches here")


def placed(state, shardings):
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, state, shardings)


# -- scalax, which takes any train step


def scalax_step(annotations, model, mesh, remat, accumulate):
    """Its example of FSDP; `annotations` names the activations too, as its README shows."""
    helper = object.__new__(scalax.MeshShardingHelper)
    helper._mesh = mesh  # its constructor takes the devices that are there
    rule = scalax.FSDPShardingRule("data", mesh.size, min_fsdp_size=rivals.SMALL // 4)

    class Named(type(model)):
        def layer(self, x, p):
            x, _ = super().layer(scalax.with_sharding_annotation(x, "activations"), p)
            return scalax.with_sharding_annotation(x, "activations"), None

    loss_of = functools.partial(Named(**vars(model)).loss, remat=remat)
    gradients = rivals.accumulated(jax.value_and_grad(loss_of), accumulate)

    @functools.partial(
        helper.sjit, in_shardings=(rule, ROWS), out_shardings=(rule, WHOLE),
        args_sharding_constraint=(rule, ROWS), donate_argnums=(0,),
        annotation_shardings={"activations": ROWS} if annotations else None,
    )  # fmt: skip
    def step(state, batch):
        loss, grads = gradients(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state = jax.eval_shape(model.make_state)
    return step, placed(state, helper.match_sharding_rule(rule, state))


# -- parallax, which takes models of nnx. AUTO reads no scan, and `remat_model` takes a list.


class ReadBlock(rivals_flax.NnxBlock):
    def __call__(self, x):
        heads = lambda x: x.reshape(*x.shape[:2], self.heads, -1)
        q, k, v = map(heads, jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))  # AUTO reads no other
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class LoopedGpt(rivals_flax.NnxGpt):
    def __init__(self, model, rngs):
        super().__init__(model, rngs)
        del self.blocks
        self.layers = nnx.List(ReadBlock(model, rngs) for _ in range(model.layers))

    def __call__(self, tokens, *_):
        x = self.embed(tokens) + self.pos.astype(self.compute)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def parallax_step(strategy, tensor, constrain, model, mesh, remat, accumulate):
    """A step with the shardings of `create_sharded_model`; AUTO splits over `tensor` devices."""
    refuse_others(model, remat, accumulate)
    auto, specs = strategy is auto_shard, {}
    mesh = jax.sharding.Mesh(mesh.devices.reshape(-1, tensor), ("data", "model")) if auto else mesh
    names = {"data_axis_name": "data", "model_axis_name": mesh.axis_names[-1]}
    settings = (mesh, remat, constrain)

    def make():
        gpt = (LoopedGpt if auto else rivals_flax.NnxGpt)(model, nnx.Rngs(0))
        return gpt, nnx.Optimizer(gpt, rivals_flax.TX, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        shapes = nnx.eval_shape(make)
        of_gpt, params = nnx.split(shapes[0])

        def read(params, tokens):
            call = lambda params, tokens: nnx.merge(of_gpt, params)(tokens, *settings)
            (of_params, _), _ = strategy.get_shardings(call, params, tokens, **names)
            specs.update((path, v.get_value()) for path, v in nnx.to_flat_state(of_params))

        jax.eval_shape(read, params, model.batch(mesh.shape["data"]))
    graph, state = nnx.split(shapes)
    # A moment's path ends as its parameter's.
    of = lambda path: next((specs[path[i:]] for i in range(len(path)) if path[i:] in specs), WHOLE)
    flat = [NamedSharding(mesh, of(path)) for path, _ in nnx.to_flat_state(state)]
    shardings = jax.tree.unflatten(jax.tree.structure(state), flat)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state, tokens):
        gpt, optimizer = nnx.merge(graph, state)
        tokens = rivals_flax.held(tokens, mesh, True)

        def loss_of(gpt):
            gpt = parallax.remat_model(gpt) if auto else gpt
            return rivals_flax.cross_entropy(gpt(tokens, *settings), tokens)

        loss, grads = nnx.value_and_grad(loss_of)(gpt)
        optimizer.update(gpt, grads)
        return nnx.state((gpt, optimizer)), loss

    return step, placed(state, shardings)


# -- Keras, with a map of layouts as its guide to distribution has


norm = functools.partial(keras.layers.LayerNormalization, center=False, epsilon=1e-6)


class Position(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], name="kernel")

    def call(self, x):
        return x + self.kernel


class Block(keras.layers.Layer):
    def __init__(self, width, heads, dtype, name):
        super().__init__(dtype=dtype, name=name)
        self.heads = heads
        dense = functools.partial(keras.layers.Dense, use_bias=False, dtype=dtype)
        self.norm1, self.norm2 = (norm(name=f"norm{i}", dtype=dtype) for i in (1, 2))
        self.qkv, self.proj = dense(3 * width, name="qkv"), dense(width, name="proj")
        self.up, self.down = dense(4 * width, name="up"), dense(width, name="down")

    def call(self, x):
        rows, tokens, width = keras.ops.shape(x)
        qkv = keras.ops.reshape(self.qkv(self.norm1(x)), (rows, tokens, 3 * self.heads, -1))
        q, k, v = keras.ops.split(qkv, 3, axis=2)
        attended = keras.ops.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(keras.ops.reshape(attended, (rows, tokens, width)))
        return x + self.down(keras.ops.gelu(self.up(self.norm2(x))))


def keras_gpt(model):
    dtype = "mixed_bfloat16" if model.compute == jnp.bfloat16 else "float32"
    embed = keras.layers.ReversibleEmbedding(model.vocab, model.hidden, dtype=dtype, name="embed")
    tokens = keras.Input((model.tokens,), dtype="int32")
    names = [f"block_{i}" for i in range(model.layers)]
    x = Position(dtype=dtype, name="pos")(embed(tokens))
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        for name in names:
            x = Block(model.hidden, model.heads, dtype, name)(x)
    return keras.Model(tokens, embed(norm(name="norm", dtype=dtype)(x), reverse=True)[:, :-1])


def layouts(mesh):
    mesh = keras.distribution.DeviceMesh((mesh.size,), ["data"], list(mesh.devices.flat))
    named = keras.distribution.LayoutMap(mesh)
    named[r".*(qkv|up)/kernel"] = ("data", None)
    named[r".*(proj|down|pos)/kernel|embed/embeddings"] = (None, "data")
    named[r".*(pos|block_\d+)/output"] = ("data", None, None)
    return keras.distribution.ModelParallel(layout_map=named, batch_dim_name="data")


def keras_step(model, mesh, remat, accumulate):
    """Its `train_step`, which `fit` jits, with AdamW."""
    refuse_others(model, remat, accumulate)
    distribution = layouts(mesh)
    optimizer = keras.optimizers.AdamW(1e-4, weight_decay=1e-4, epsilon=1e-8)
    shapes_only = functools.partial(keras.StatelessScope, initialize_variables=False)
    with distribution.scope(), shapes_only():
        gpt = keras_gpt(model)
        optimizer.build(gpt.trainable_variables)
        gpt.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    layout_of = lambda v: distribution.get_variable_layout(v).backend_layout
    params = {v.path: layout_of(v) for v in gpt.trainable_variables}
    moments = {f"{of}/{name}": place for name, place in params.items() for of in ("mu", "nu")}
    scalars = lambda *names: dict.fromkeys(names, NamedSharding(mesh, WHOLE))
    moments = scalars("iteration", "learning_rate") | moments
    shardings = {"params": params, "opt_state": moments, "metrics": scalars("total", "count")}
    by_name = lambda groups: {
        k: dict(zip(shardings[k], group, strict=True))
        for k, group in zip(shardings, groups, strict=True)
    }
    named = by_name((gpt.trainable_variables, optimizer.variables, gpt.metrics_variables))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(values, tokens):
        # A jitted function sorts names; Keras has an order of its own.
        params, *others = ([values[k][name] for name in named[k]] for k in named)
        state, data = (params, [], *others), (tokens, tokens[:, 1:])
        with distribution.scope(), shapes_only():
            logs, (params, _, *others) = gpt.train_step(state, data)
        return by_name((params, *others)), logs["loss"]

    return step, placed(named, shardings)


STEPS = {
    "scalax": functools.partial(scalax_step, False),
    "scalax, blocks": functools.partial(scalax_step, True),
    "parallax FSDP": functools.partial(parallax_step, fsdp, 1, False),
    "parallax FSDP, blocks": functools.partial(parallax_step, fsdp, 1, True),
    "parallax AUTO, pairs": functools.partial(parallax_step, auto_shard, 2, False),
    "parallax AUTO, hosts": functools.partial(parallax_step, auto_shard, 8, False),
    "keras": keras_step,
}

if __name__ == "__main__":
    compiled.STEPS.update(STEPS)
    flagged = ("scalax, blocks", "parallax FSDP, blocks", "keras")
    chosen = compiled.MAIN.rivals(*STEPS)
    chosen += compiled.MAIN.rivals(*flagged, options=compiled.SCATTER_ONE)
    results.main(
        __doc__, compiled.HERE / "rivals_packages.json", {row.name: row for row in chosen},
        figures.versions(PACKAGES), compiled.measure,
    )  # fmt: skip
