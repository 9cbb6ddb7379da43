"""Programs that are in no package, written anew in their manner, and those of smaller libraries: as
they are for one device or for `jax.pmap`, and with the lines that had to change."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState

from tests.foreign.program import (
    KEY,
    ROWS,
    TX,
    Port,
    Program,
    absent,
    importable,
    library,
    mapped,
    normal,
    ported,
    random,
    state_of,
    tokens,
)

# -- nanodo: parameters are annotated for a mesh with the axis "data"

NANODO = """
import functools

import flax.linen as nn, jax, jax.numpy as jnp, optax

WIDTH, HEADS, VOCAB = 32, 2, 64
over = lambda *axes: nn.with_partitioning(nn.initializers.xavier_uniform(), axes)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        size = WIDTH // HEADS
        project = functools.partial(
            nn.DenseGeneral, (HEADS, size), kernel_init=over("data", None, None), use_bias=False
        )
        q, k, v = (project(name=name)(x) for name in ("query", "key", "value"))
        scores = jnp.einsum("...qhd,...khd->...hqk", q / size**0.5, k)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(x.dtype).min))
        y = jnp.einsum("...hqk,...khd->...qhd", scores, v)
        out = nn.DenseGeneral(
            WIDTH, axis=(-2, -1), kernel_init=over(None, None, "data"), use_bias=False
        )
        return out(y)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, kernel_init=over("data", None), use_bias=False)
        x += Attention()(nn.LayerNorm(use_bias=False)(x))
        z = nn.LayerNorm(use_bias=False)(x)
        return x + dense(WIDTH)(jax.nn.gelu(dense(4 * WIDTH)(z)))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=over(None, "data"))
        places = nn.Embed(ids.shape[1], WIDTH, embedding_init=over(None, "data"))
        x = Block()(table(ids) + places(jnp.arange(ids.shape[1])))
        return table.attend(nn.LayerNorm(use_bias=False)(x))


def train_step(state, ids):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, ids[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        known = (ids[:, 1:] > 0).astype(jnp.float32)
        return jnp.sum(losses * known) / jnp.sum(known)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
"""


def nanodo() -> Program:
    theirs, ours, lines = ported(
        "nanodo",
        NANODO,
        [
            ("import functools\n\n", "import functools\n\nimport zerojax\n"),
            ("def train_step(state, ids):\n", "def train_loss(params, ids, apply_fn):\n"),
            ("state.apply_fn(", "apply_fn("),
            (
                "        known = (ids[:, 1:] > 0).astype(jnp.float32)\n"
                "        return jnp.sum(losses * known) / jnp.sum(known)\n",
                "        return zerojax.mean(losses, where=ids[:, 1:] > 0)\n",
            ),
            (
                "    loss, grads = jax.value_and_grad(loss_fn)(state.params)\n...\n"
                "    return state.apply_gradients(grads=grads), loss\n",
                "    return loss_fn(params)\n",
            ),
        ],
    )
    model = theirs.Decoder()
    ids = np.where(np.arange(9) < np.arange(ROWS)[:, None] % 5 + 3, tokens(9), 0)
    init = jax.jit(lambda: model.init(KEY, ids[:, 1:])["params"])
    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = functools.partial(ours.train_loss, apply_fn=model.apply)
    return Program(make, loss, ids, port=Port(jax.jit(theirs.train_step), lines))


# -- SigLIP: each image against each text of the batch, by a sigmoid. (The gradient of a bias of the
# keys would be zero but for rounding.)

SIGLIP = """
import flax.linen as nn, jax, jax.numpy as jnp


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x += self.param("pos_embedding", nn.initializers.normal(0.2), (1, *x.shape[1:]))
        x += nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)(nn.LayerNorm()(x))
        x += nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        z = nn.Dense(16)(nn.LayerNorm()(x).mean(axis=1))
        return z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-8)


class TwoTowers(nn.Module):
    @nn.compact
    def __call__(self, image, text):
        image = nn.Conv(32, (8, 8), strides=(8, 8), padding="VALID")(image)
        zimg = Tower()(image.reshape(len(image), -1, 32))
        ztxt = Tower()(nn.Embed(64, 32)(text))
        t = self.param("t", nn.initializers.constant(jnp.log(10.0)), (1,))
        return zimg, ztxt, jnp.exp(t), self.param("b", nn.initializers.constant(-10.0), (1,))


def update_fn(state, batch):
    def loss_fn(params):
        zimg, ztxt, t, b = state.apply_fn({"params": params}, batch["image"], batch["labels"])
        eye = jnp.eye(len(zimg))
        logits = zimg @ ztxt.T * t + b
        loglik = jax.nn.log_sigmoid((2 * eye - 1) * logits)
        return jnp.mean(-jnp.sum(loglik, axis=-1))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
"""


def siglip() -> Program:
    theirs, ours, lines = ported(
        "siglip",
        SIGLIP,
        [
            ("def update_fn(state, batch):\n", "def train_loss(params, batch, apply_fn):\n"),
            ("state.apply_fn(", "apply_fn("),
            (
                "        eye = jnp.eye(len(zimg))\n",
                "        rows = jax.lax.axis_index('data') * len(zimg) + jnp.arange(len(zimg))\n"
                "        ztxt = jax.lax.all_gather(ztxt, 'data', tiled=True)\n"
                "        eye = jax.nn.one_hot(rows, len(ztxt))\n",
            ),
            (
                "    loss, grads = jax.value_and_grad(loss_fn)(state.params)\n...\n"
                "    return state.apply_gradients(grads=grads), loss\n",
                "    return loss_fn(params)\n",
            ),
        ],
    )
    model = theirs.TwoTowers()
    batch = {"image": normal(ROWS, 16, 16, 3), "labels": tokens(8)}
    init = jax.jit(lambda: model.init(KEY, batch["image"], batch["labels"])["params"])
    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = functools.partial(ours.train_loss, apply_fn=model.apply)
    return Program(make, loss, batch, port=Port(jax.jit(theirs.update_fn), lines))


# -- DQN, as purejaxrl has it: the loss reads a second network in the state

DQN = """
import flax.linen as nn, jax, jax.numpy as jnp


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(6)(x)


def learn(state, batch):
    q_next = state.apply_fn(state.target_network_params, batch["second_obs"])
    target = batch["reward"] + 0.99 * (1 - batch["done"]) * jnp.max(q_next, axis=-1)

    def loss_fn(params):
        q_vals = state.apply_fn(params, batch["first_obs"])
        q_taken = jnp.take_along_axis(q_vals, batch["action"][:, None], axis=-1)[:, 0]
        return jnp.mean((q_taken - target) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
"""


class DQNState(TrainState):
    target_network_params: Any


def dqn() -> Program:
    theirs, ours, lines = ported(
        "dqn",
        DQN,
        [
            (
                "def learn(state, batch):\n"
                "    q_next = state.apply_fn(state.target_network_params, batch[",
                "def learn(params, batch, target_network_params, apply_fn):\n"
                "    q_next = apply_fn(target_network_params, batch[",
            ),
            ("q_vals = state.apply_fn(", "q_vals = apply_fn("),
            (
                "    loss, grads = jax.value_and_grad(loss_fn)(state.params)\n"
                "    return state.apply_gradients(grads=grads), loss\n",
                "    return loss_fn(params), {'target_network_params': target_network_params}\n",
            ),
        ],
    )
    model = theirs.QNetwork()
    batch = {
        "first_obs": normal(ROWS, 4),
        "second_obs": normal(ROWS, 4),
        "action": random.integers(0, 6, ROWS).astype(np.int32),
        "reward": normal(ROWS),
        "done": np.zeros(ROWS, np.float32),
    }
    init = jax.jit(lambda key: model.init(key, batch["first_obs"]))
    make = lambda: DQNState.create(
        apply_fn=model.apply, params=init(KEY), tx=TX, target_network_params=init(jax.random.key(1))
    )
    loss = functools.partial(ours.learn, apply_fn=model.apply)
    port = Port(jax.jit(theirs.learn), lines)
    return Program(make, loss, batch, ("target_network_params",), port=port)


# -- MAML: a step of descent for each task, within the loss

MAML = """
import jax, jax.numpy as jnp


def net(params, x):
    x = jnp.tanh(x @ params["w1"] + params["b1"])
    x = jnp.tanh(x @ params["w2"] + params["b2"])
    return x @ params["w3"] + params["b3"]


def loss(params, x, y):
    return jnp.mean((net(params, x) - y) ** 2)


def maml_loss(params, x1, y1, x2, y2):
    grads = jax.grad(loss)(params, x1, y1)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return loss(params, x2, y2)


def batch_loss(params, tasks):
    return jnp.mean(jax.vmap(maml_loss, in_axes=(None, 0, 0, 0, 0))(params, *tasks))


def train_step(state, tasks):
    loss, grads = jax.value_and_grad(batch_loss)(state.params, tasks)
    return state.apply_gradients(grads=grads), loss
"""


def maml() -> Program:
    """Each task is on one device, and nothing of its loss is to change."""
    update = (
        "\n\ndef train_step(state, tasks):\n...\n"
        "    return state.apply_gradients(grads=grads), loss\n"
    )
    theirs, ours, lines = ported("maml", MAML, [(update, "")])
    sizes = {"w1": (1, 64), "b1": (64,), "w2": (64, 64), "b2": (64,), "w3": (64, 1), "b3": (1,)}
    params = {name: jnp.asarray(normal(*size) / 8) for name, size in sizes.items()}
    tasks = tuple(normal(ROWS, 10, 1) for _ in range(4))
    port = Port(jax.jit(theirs.train_step), lines)
    return Program(lambda: state_of(params), ours.batch_loss, tasks, port=port)


# -- jraph: as many graphs on each device, padded to as many nodes


def graph_network() -> Program:
    jraph, hk = library("jraph"), library("haiku")
    file = pathlib.Path(jraph.__file__).parent / "ogb_examples/train.py"
    with importable(absent("absl", "pandas")):
        theirs, ours, lines = ported(
            "ogb",
            file.read_text(),
            [
                (
                    "\n\ndef train(data_path,",
                    "\n\ndef mean_loss(params, batch, net):\n"
                    "  of_graphs = functools.partial(compute_loss, net=net)\n"
                    "  parts = jax.vmap(of_graphs, (None, 0, 0))(params, *batch)\n"
                    "  return jax.tree.map(jnp.mean, parts)\n"
                    "\n\ndef train(data_path,",
                )
            ],
        )

    def graphs():
        one = jraph.GraphsTuple(
            n_node=np.array([3, 2]), n_edge=np.array([4, 2]), nodes=normal(5, 9),
            edges=normal(6, 3), globals={}, senders=random.integers(0, 3, 6),
            receivers=random.integers(0, 3, 6),
        )  # fmt: skip
        return jraph.pad_with_graphs(one, 8, 8, 3)

    net = hk.without_apply_rng(hk.transform(theirs.net_fn))
    stack = lambda *parts: np.stack(parts)
    batch = (jax.tree.map(stack, *[graphs() for _ in range(8)]), random.integers(0, 2, (8, 3)))
    init = jax.jit(lambda: net.init(KEY, jax.tree.map(lambda x: x[0], batch[0])))

    @jax.jit
    def step(state, batch):
        loss_fn = functools.partial(theirs.compute_loss, net=net)
        of_all = lambda params: jax.vmap(loss_fn, (None, 0, 0))(params, *batch)[0].mean()
        loss, grads = jax.value_and_grad(of_all)(state.params)
        return state.apply_gradients(grads=grads), loss

    loss = functools.partial(ours.mean_loss, net=net)
    return Program(lambda: state_of(init()), loss, batch, port=Port(step, lines))


# -- a UNet of diffusers, with the step of its scripts for `jax.pmap`

UNET = """
import jax, jax.numpy as jnp


def train_step(state, batch):
    def compute_loss(params):
        t = batch["timesteps"][:, None, None, None] / 1000
        noisy = jnp.sqrt(1 - t) * batch["latents"] + jnp.sqrt(t) * batch["noise"]
        model_pred = state.apply_fn(
            {"params": params}, noisy, batch["timesteps"], batch["text"], train=True
        ).sample
        return ((batch["noise"] - model_pred) ** 2).mean()

    loss, grad = jax.value_and_grad(compute_loss)(state.params)
    grad = jax.lax.pmean(grad, "batch")
    new_state = state.apply_gradients(grads=grad)
    return new_state, jax.lax.pmean(loss, axis_name="batch")
"""


def unet() -> Program:
    diffusers = library("diffusers")
    theirs, ours, lines = ported(
        "unet",
        UNET,
        [
            (
                "def train_step(state, batch):\n    def compute_loss(params):\n",
                "def train_loss(params, batch, apply_fn):\n    def compute_loss(params):\n",
            ),
            (" state.apply_fn(", " apply_fn("),
            (
                "    loss, grad = jax.value_and_grad(compute_loss)(state.params)\n...\n"
                '    return new_state, jax.lax.pmean(loss, axis_name="batch")\n',
                "    return compute_loss(params)\n",
            ),
        ],
    )
    model = diffusers.FlaxUNet2DConditionModel(
        sample_size=8, down_block_types=("CrossAttnDownBlock2D",), cross_attention_dim=16,
        up_block_types=("CrossAttnUpBlock2D",), block_out_channels=(32,), layers_per_block=1,
        attention_head_dim=4,
    )  # fmt: skip
    latents = normal(ROWS, 4, 8, 8), normal(ROWS, 4, 8, 8)
    times = random.integers(0, 1000, ROWS).astype(np.int32)
    batch = {"latents": latents[0], "noise": latents[1], "timesteps": times}
    batch["text"] = normal(ROWS, 4, 16)
    make = lambda: TrainState.create(apply_fn=model.apply, params=model.init_weights(KEY), tx=TX)
    loss = functools.partial(ours.train_loss, apply_fn=model.apply)
    return Program(make, loss, batch, port=Port(mapped(theirs.train_step), lines))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "nanodo": nanodo,
    "siglip": siglip,
    "dqn": dqn,
    "maml": maml,
    "jraph": graph_network,
    "diffusers_unet": unet,
}
