"""How layers pass through single operations, against the numbers of one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax._update import parts as _parts, rules as _rules
from zerojax._update.rules import MIXED, SAME

LAYERS = 3
X = jax.ShapeDtypeStruct((LAYERS, 4, 6), "float32")
FREE = jnp.arange(24.0).reshape(6, 4) / 24
KEEP = {
    "elementwise": lambda x: jnp.exp(x) * 2 + x,
    "by a scalar": lambda x: x * jnp.sum(FREE),
    "where": lambda x: jnp.where(x > 0.5, x, -x),
    "clip": lambda x: jnp.clip(x, 0.2, 0.7),
    "sum of a layer": lambda x: x / jnp.sum(x, axis=(1, 2), keepdims=True),
    "transpose": lambda x: x.transpose(0, 2, 1),
    "moved": lambda x: jnp.moveaxis(jnp.moveaxis(x, 0, 2) * 2, 2, 0),
    "reshape": lambda x: jnp.sqrt(x.reshape(LAYERS if x.shape[0] > 1 else 1, -1)),
    "expanded": lambda x: (x[:, None] * jnp.ones((1, 2, 1, 1)))[:, 0],
    "slice": lambda x: x[:, 1:3, ::2],
    "reversed": lambda x: x[:, ::-1],
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))),
    "concatenated": lambda x: jnp.concatenate([x, 2 * x], axis=1),
    "sorted": lambda x: jnp.sort(x, axis=2),
    "cumulated": lambda x: jnp.cumsum(x, axis=1),
    "argmax": lambda x: jnp.argmax(x, axis=2),
    "times a matrix": lambda x: x @ FREE,
    "matrix times": lambda x: jnp.einsum("ab,lbc->lac", FREE, x),
    "batched product": lambda x: jnp.einsum("lab,lcb->lac", x, x),
    "rounded": lambda x: lax.reduce_precision(x, 8, 7),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint32) >> 16,
    "bytes": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "constants": lambda x: x + jnp.ones_like(x) * jnp.arange(6.0),
    "barrier": lambda x: lax.optimization_barrier((x, FREE))[0],
}  # fmt: skip
MIX = {
    "sum": lambda x: x / jnp.sum(x),
    "sum over layers": lambda x: x - x.sum(0, keepdims=True),
    "running": lambda x: jnp.cumsum(x, axis=0),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "reversed": lambda x: x[::-1],
    "first layer": lambda x: x[:1] + x,
    "flat": lambda x: jnp.sort(x.reshape(-1)),
    "merged": lambda x: x.reshape(-1, 6) @ FREE,
    "product": lambda x: jnp.einsum("lab,mab->lm", x, x),
    "contracted": lambda x: jnp.einsum("lab,lac->bc", x, x),
    "numbers of layers": lambda x: x * x.shape[0],
    "layers told apart": lambda x: x + jnp.arange(float(x.shape[0]))[:, None, None],
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "a gather": lambda x: jnp.take(x, jnp.array([0, 0, 0][: x.shape[0]]), axis=0),
}  # fmt: skip


def labelled(function):
    update = _parts.Update(lambda v: [function(v[0])], [X], [True], [True])
    pair = update.full.outvars[0], update.one.outvars[0]
    return update, _rules.label(*pair, update.labels) if update.alike else MIXED


@pytest.mark.parametrize("name", KEEP)
def test_kept(name):
    update, label = labelled(KEEP[name])
    assert label == 0, update.mixers
    x = jax.random.uniform(jax.random.key(0), X.shape)
    whole = KEEP[name](x)
    layers = [KEEP[name](x[i : i + 1]) for i in range(LAYERS)]
    np.testing.assert_allclose(jnp.concatenate(layers), whole, rtol=1e-6)


@pytest.mark.parametrize("name", MIX)
def test_mixed(name):
    _, label = labelled(MIX[name])
    assert label != 0


def test_a_label_that_the_shapes_contradict_is_none():
    full, one = (
        jax.make_jaxpr(jnp.sin)(jnp.ones(shape)).jaxpr.outvars[0] for shape in [(3, 4), (1, 4)]
    )
    assert _rules.agrees(0, full, one) and _rules.agrees(MIXED, full, one)
    assert not _rules.agrees(1, full, one) and not _rules.agrees(SAME, full, one)
    assert _rules.agrees(SAME, full, full) and not _rules.agrees(0, full, full)
