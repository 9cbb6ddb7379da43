"""Levanter's own train step, compiled on a machine without GPUs.

    python3.12 -m venv .venv/levanter
    V=0.2.227.dev40316220070
    .venv/levanter/bin/pip install --no-deps marin-levanter==$V marin-haliax==$V marin-fray==$V \
        marin-finestore==$V marin-iris==$V marin-rigging==$V marin-finelog==0.2.10 \
        jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
    .venv/levanter/bin/pip install -e . jax==0.12.0.1 flax==0.12.12 optax==0.2.8 \
        nvidia-cuda-nvcc nvidia-nvvm aiohttp aqtp braceexpand chex cloudpickle connect-python \
        draccus einops equinox gitpython google-cloud-storage humanfriendly jaxtyping jinja2 jmp \
        msgspec pyarrow pytimeparse s3fs tblib tqdm_loggable transformers wandb zstandard
    .venv/levanter/bin/python benchmarks/rivals_levanter.py --json

Levanter's: trainer, train step, model (`gpt2`), mesh, mappings of axes, optimizer, donation. It
asks for a JAX before 0.12, and runs on 0.12 unchanged. Ours: the devices it finds, and shapes in
place of arrays. Unlike its defaults: attention without a kernel library, because there is none when
compiling without devices. Its loss is the one that it takes without GPUs; we model the one for GPUs
96 ms slower. Matmuls have biases.
"""

import figures  # sets how jax starts

# isort: split
import contextlib
from unittest import mock

import equinox as eqx
import haliax as hax
import jax
import jmp
from haliax import partitioning
from levanter import tracker
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState

MODEL = figures.MODEL
GPT = Gpt2Config(
    num_layers=MODEL.layers, hidden_dim=MODEL.hidden, num_heads=MODEL.heads,
    max_seq_len=MODEL.tokens, attn_backend=AttentionBackend.VANILLA,
)  # fmt: skip
VOCAB = hax.Axis("vocab", MODEL.vocab)


def loss(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


def is_shape(x):
    return isinstance(x, jax.ShapeDtypeStruct)


def placed(tree, mapping, mesh):
    """Returns shapes with the shardings of a mapping."""
    shardings = partitioning.infer_resource_partitions(tree, mapping, mesh=mesh)

    def place(named, sharding):
        cut = lambda x: x.update(sharding=sharding) if is_shape(x) else x
        return jax.tree.map(cut, named)

    return jax.tree.map(place, tree, shardings, is_leaf=lambda x: isinstance(x, hax.NamedArray))


@contextlib.contextmanager
def inside(mesh):
    """Does what `jax.set_mesh` does, but runs nothing on the missing devices."""
    with mesh, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def without_devices(devices):
    is_array = lambda x: eqx.is_array(x) or is_shape(x)
    with (
        mock.patch.object(jax, "devices", lambda: devices),
        mock.patch.object(jax, "device_count", lambda: len(devices)),
        mock.patch.object(partitioning, "is_array", is_array),
        mock.patch.object(partitioning, "set_mesh", inside),
        tracker.current_tracker(tracker.NoopTracker()),
    ):
        yield


def lowered(rows):
    config = TrainerConfig(mp=jmp.get_policy("p=f32,c=bfloat16"), train_batch_size=rows)
    optimizer = AdamConfig().build(config.num_train_steps)

    def make_state():
        key = jax.random.PRNGKey(0)
        return TrainerState.init(optimizer, GPT.build(VOCAB, key=key), key=key, mp=config.mp)

    def of_batch(dtype):
        shape = jax.ShapeDtypeStruct((rows, MODEL.tokens), dtype)
        return hax.NamedArray(shape, (config.TrainBatch, GPT.max_Pos))

    with Trainer(config, optimizer, loss, add_default_hooks=False) as trainer:
        mesh = trainer.device_mesh
        state = eqx.filter_eval_shape(make_state)
        state = placed(state, trainer.parameter_axis_mapping, mesh)
        batch = LmExample(of_batch("int32"), of_batch("float32"), AttentionMask.causal())
        batch = placed(batch, trainer.compute_axis_mapping, mesh)
        return trainer._jit_train_step_fn_no_hook.lower(state, (batch,), {})


def compiled(mesh, remat, options):
    assert remat == "full"  # its default
    with without_devices(list(mesh.devices.flat)):
        program = lowered(figures.ROWS_PER_GPU * mesh.size)
    return program.compile(compiler_options=options)


if __name__ == "__main__":
    packages = ("marin-levanter", "marin-haliax", "equinox", "optax")
    figures.main("Levanter", compiled, ("full",), packages)
