"""Models, layers and likelihoods of other libraries, as their guides write them for one device, at
sizes that compile soon. None knows of zerojax."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import zerojax
from tests.foreign import program as _p
from tests.foreign.program import KEY, ROWS, TX, Program, normal, tokens

alike = lambda rows: np.tile(rows, (8, *[1] * (rows.ndim - 1)))  # to each device the same rows


@struct.dataclass
class ExtraModuleState(zerojax.ModuleState):
    extra: Any = None


# -- transformers


def penzai_llama() -> Program:
    """Parameters are labelled variables, arrays have named axes."""
    pz = _p.library("penzai.pz")
    llama = _p.library("penzai.models.transformer.variants.llamalike_common")
    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=1, query_head_multiplier=2, embedding_dim=32, projection_dim=16,
        mlp_hidden_dim=64, num_decoder_blocks=2, vocab_size=64, mlp_variant="swiglu",
        tie_embedder_and_logits=False, use_layer_stack=True,
    )  # fmt: skip

    def split():
        model = llama.build_llamalike_transformer(config, KEY)
        model, params = pz.unbind_params(model)
        return model, pz.freeze_params(params)

    model = split()[0]

    def loss(params, ids):
        bound = pz.bind_variables(model, params)
        named = pz.nx.wrap(ids).tag("batch", "seq")
        logits = bound(named, token_positions=pz.nx.arange("seq", ids.shape[1]))
        return _p.next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), ids)

    return Program(lambda: _p.state_of(split()[1]), loss, tokens(8))


# -- layers and their statistics


def haiku_batch_norm() -> Program:
    """Its averages count their steps, in an integer."""
    hk = _p.library("haiku")

    def model(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(32, with_bias=False)(x), is_training=True)
        return hk.Linear(4)(jax.nn.tanh(x))

    net = hk.without_apply_rng(hk.transform_with_state(model))
    batch = alike(normal(4, 32))

    def loss(params, x, extra):
        y, extra = net.apply(params, extra, x)
        return jnp.mean((y - x[:, :4]) ** 2), {"extra": extra}

    def make():
        params, extra = net.init(KEY, batch)
        return _p.state_of(params, extra=extra)

    return Program(make, loss, batch, ("extra",))


def equinox_batch_norm() -> Program:
    eqx = _p.library("equinox")

    class Model(eqx.Module):
        linear: Any
        norm: Any

        def __init__(self, key):
            self.linear = eqx.nn.Linear(32, 32, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def loss(model, x, extra):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, extra = run(x, extra)
        return jnp.mean((jnp.tanh(y) - x) ** 2), {"extra": extra}

    def make():
        model, extra = eqx.nn.make_with_state(Model)(KEY)
        return ExtraModuleState.create(model, TX, extra=extra)

    return Program(make, loss, alike(normal(4, 32)), ("extra",))


def keras() -> Program:
    """Its variables are two lists of arrays."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = _p.library("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend; set KERAS_BACKEND=jax")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 16)),
            keras.layers.LSTM(32),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, activation="tanh"),
        ]
    )

    def loss(params, batch, extra):
        y, extra = model.stateless_call(params, extra, batch["x"], training=True)
        return keras.losses.MeanSquaredError()(batch["y"], y), {"extra": extra}

    def make():
        params, extra = (
            [v.value for v in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        return _p.state_of(params, extra=extra)

    batch = {"x": alike(normal(4, 8, 16)), "y": alike(normal(4, 4))}
    return Program(make, loss, batch, ("extra",))


# -- solvers


def diffrax_backsolve() -> Program:
    """A neural ODE, whose backward solves another one."""
    eqx, diffrax = _p.library("equinox"), _p.library("diffrax")

    class Field(eqx.Module):
        mlp: Any

        def __call__(self, t, y, args):
            return self.mlp(y)

    def loss(field, x):
        solve = lambda y: diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, y, max_steps=8,
            adjoint=diffrax.BacksolveAdjoint(),
        ).ys[-1]  # fmt: skip
        return jnp.mean((jax.vmap(solve)(x) - 1) ** 2)

    def make():
        mlp = eqx.nn.MLP(8, 8, 32, 1, jnp.tanh, key=KEY)
        return zerojax.ModuleState.create(Field(mlp), TX)

    return Program(make, loss, normal(ROWS, 8))


# -- likelihoods


def flowjax_flow() -> Program:
    """A stack of layers under a scan; what is not to be trained is wrapped as such."""
    flows, paramax = _p.library("flowjax.flows"), _p.library("paramax")
    distributions = _p.library("flowjax.distributions")

    def make():
        flow = flows.masked_autoregressive_flow(
            KEY, base_dist=distributions.Normal(jnp.zeros(4)), flow_layers=2,
            nn_width=32,
        )  # fmt: skip
        return zerojax.ModuleState.create(flow, TX)

    # Masks all layers' weights at once, before the scan over them.
    loss = lambda flow, x: -paramax.unwrap(flow).log_prob(x).mean()
    return Program(
        make, loss, normal(ROWS, 4), unmet="all 2 layers of .* at once|for backward, all layers"
    )


def numpyro_svi() -> Program:
    """A Bayesian network by variational inference: the bound on a part of the data set."""
    numpyro = _p.library("numpyro")
    dist, infer = _p.library("numpyro.distributions"), _p.library("numpyro.infer")
    autoguide = _p.library("numpyro.infer.autoguide")
    rows = 4 * ROWS

    def model(x, y):
        w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((8, 32)), 1.0).to_event())
        w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((32,)), 1.0).to_event())
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("rows", rows, subsample_size=len(x)):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ w1) @ w2, noise), obs=y)

    batch = {"x": normal(ROWS, 8), "y": normal(ROWS)}
    guide = autoguide.AutoNormal(model)
    bound = infer.TraceMeanField_ELBO()
    svi = infer.SVI(model, guide, numpyro.optim.optax_to_numpyro(TX), bound)
    start = svi.init(KEY, **batch)
    params = svi.get_params(start)

    def loss(params, batch):
        key = jax.random.key(1)  # the same draw on every device
        return bound.loss(key, params, model, guide, **batch) / rows

    return Program(lambda: _p.state_of(params), loss, batch)


LIGHT = {each.__name__: each for each in (haiku_batch_norm, equinox_batch_norm)}
HEAVY = (penzai_llama, keras, diffrax_backsolve, flowjax_flow, numpyro_svi)
HEAVY = {each.__name__: each for each in HEAVY}
