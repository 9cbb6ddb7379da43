"""Weights that microbatches share: the gradients are JAX's, in the dtype of their sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax._loss.shared import Last, Shared, bound, mapped, shared

EINSUMS = [  # what is no weight, a weight, their product
    "ab,bc->ac", "ab,cb->ca", "xab,bc->xac", "abcd,dbe->ace", "abc,bcd->abd", "ab,a->b",
    "abc,cb->a", "bac,bcd->dba", "a,b->ab", "abcde,cefg->abdgf",
]  # fmt: skip


@pytest.mark.parametrize("spec", EINSUMS)
@pytest.mark.parametrize("first", (False, True))
def test_the_gradient_of_every_product_is_that_of_jax(spec, first):
    sizes = dict(zip("abcdefgx", (2, 3, 4, 5, 6, 7, 8, 9), strict=True))
    left, right, out = spec.replace("->", ",").split(",")
    shapes = [tuple(sizes[s] for s in side) for side in (left, right, out)]
    keys = jax.random.split(jax.random.key(0), 3)
    other, weight, ct = map(jax.random.normal, keys, shapes)

    def product(other, weight):
        operands = (weight, other) if first else (other, weight)
        names = f"{right},{left}->{out}" if first else spec
        return jnp.einsum(names, *operands)

    wide, vjp = jax.vjp(product, other, weight)
    narrow = [x.astype(jnp.bfloat16) for x in (other, weight)]
    jaxpr = jax.make_jaxpr(product)(*narrow).jaxpr

    def by_hand(other, total):
        env = {jaxpr.invars[0]: other, jaxpr.invars[1]: Shared(narrow[1], total)}
        for eqn in jaxpr.eqns:
            inner = getattr(eqn.params.get("jaxpr"), "jaxpr", eqn.params.get("jaxpr"))
            if inner is not None:  # einsum's own jit
                env |= dict(zip(inner.invars, (env[v] for v in eqn.invars), strict=True))
                for e in inner.eqns:
                    env |= dict(zip(e.outvars, bound(e, [env[v] for v in e.invars]), strict=True))
                env |= dict(zip(eqn.outvars, (env[v] for v in inner.outvars), strict=True))
            else:
                outs = bound(eqn, [env[v] for v in eqn.invars])
                env |= dict(zip(eqn.outvars, outs, strict=True))
        return env[jaxpr.outvars[0]]

    total = jnp.zeros(weight.shape, jnp.float32)
    value, by_hand_vjp = jax.vjp(by_hand, narrow[0], total)
    np.testing.assert_allclose(value.astype(jnp.float32), wide, rtol=0.05, atol=0.1)
    d_other, d_total = by_hand_vjp(ct.astype(jnp.bfloat16))
    assert d_other.dtype == jnp.bfloat16 and d_total.dtype == jnp.float32
    for got, want in zip((d_other, d_total), vjp(ct), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.05, atol=0.1)


def test_a_sum_of_many_gradients_keeps_the_small_ones():
    """2048 ones: in bfloat16 the sum would stop at 256."""
    parts = [jnp.ones((2048,), jnp.bfloat16)]
    one = lambda weights, consts, part: bound(product.eqns[0], [part[0], *weights])
    product = jax.make_jaxpr(jnp.multiply)(jnp.bfloat16(1), jnp.bfloat16(1)).jaxpr

    def loss(weight):
        (outs,) = mapped(one, [shared(weight)], [], parts, 2048)
        return outs.astype(jnp.float32).sum()

    assert jax.grad(loss)(jnp.bfloat16(2)) == 2048


def test_gradients_that_forward_takes_are_those_of_backward():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(keys[0], (8, 4)), jnp.arange(3)]
    parts = [jax.random.normal(keys[1], (5, 6, 8)), jnp.arange(5), jax.random.split(keys[2], 5)]
    consts = [jnp.float32(0.5)]

    def one(weights, consts, part):
        (w, ints), (x, index, key) = weights, part
        w = w.value if isinstance(w, Shared) else w
        noise = jax.random.normal(key, x.shape)
        return [index + ints[0], jnp.sum(jnp.tanh((x + noise) @ w)) * consts[0]]

    def total(run, *varied):
        outs = run(one, [varied[0], weights[1]], consts, [varied[1], *parts[1:]], 5)
        return 0.25 * outs[1].sum() * varied[2], outs

    early = lambda one, *args: Last(reading(one), args[-1], 1, 0.25)(*args[:-1])
    varied = weights[0], parts[0], jnp.float32(3)
    found = [
        jax.value_and_grad(lambda *v, run=run: total(run, *v), argnums=(0, 1), has_aux=True)(
            *varied
        )
        for run in (early, mapped)
    ]
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def reading(one):
    """`one`, whose first weight is read through a matmul that knows the sum."""

    def read(weights, consts, part):
        identity = jax.make_jaxpr(lambda w: w * 1.0)(jnp.zeros((8, 4))).jaxpr.eqns[0]
        (w,) = bound(identity, [weights[0], 1.0])
        return one([w, weights[1]], consts, part)

    return read
