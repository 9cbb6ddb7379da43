"""Single operations in a loss whose sequences are split: what models seldom do, at odd lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.compared import mesh_of
from zerojax import _compat

ROWS, DIM = 2, 6
WEIGHTS = np.random.default_rng(0).normal(size=(DIM, DIM)).astype(np.float32) / 3


def norm(x):  # which has no derivative at 0
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@jax.custom_vjp
def shrunk(x):
    return x


shrunk.defvjp(lambda x: (x, x), lambda x, g: (g + 0.1 * jnp.sign(x),))


@jax.custom_vjp
def mean_of_tokens(x):
    return x.mean(1)


mean_of_tokens.defvjp(
    lambda x: (x.mean(1), x.shape),
    lambda shape, g: (jnp.broadcast_to(g[:, None] / shape[1], shape),),
)


@jax.custom_vjp
def with_places(x):
    return 2 * x, (x > 0).astype(int), jnp.argmax(x, 1)


with_places.defvjp(lambda x: (with_places(x), None), lambda _, g: (2 * g[0],))


@jax.custom_jvp
def with_signs(x, i):
    return x * i[..., None], i + 1


@with_signs.defjvp
def _(primals, tangents):
    (x, i), (dx, _) = primals, tangents
    return with_signs(x, i), (dx * i[..., None], np.zeros(i.shape, jax.dtypes.float0))


def of_signs(x):
    y, i = with_signs(x, (x[..., 0] > 0).astype(int))
    return y**2 * i[..., None]


def noisy_scan(x):
    def step(carry, row):
        key, h = carry
        key, own = jax.random.split(key)
        h = jnp.tanh(h + row) + 0.1 * jax.random.normal(own, row.shape)
        return (key, h), h

    return jax.lax.scan(step, (jax.random.key(1), jnp.zeros(x[:, 0].shape)), x.swapaxes(0, 1))[1]


def placed(x):
    tokens, dims = jnp.array([1, 5, 40]), jnp.array([2, 9, 3])
    integers = (100 * x[..., 0]).astype(int)
    low = integers.at[:, tokens].get(mode="fill") < -1000
    clipped = x.at[:, tokens[:2], dims[:2]].get(mode="clip")
    return (
        clipped.sum() * (1 + low.sum()) + jnp.nan_to_num(x.at[:, tokens, 0].get(mode="fill")).sum()
    )


def after_nothing(x):
    x = jnp.where(jnp.arange(x.shape[1])[:, None] < 5, -jnp.inf, x)
    sums = jax.lax.stop_gradient(jax.lax.cumlogsumexp(x, 1))
    return jnp.where(jnp.isneginf(sums), -1.0, sums)


def both_bits(x):
    numbers = (1e6 * x[0, :, 0]).astype(int) | 6
    return jax.lax.reduce_and(numbers, (0,)).astype(float) * x.sum()


CASES = {
    "norm of a slice": lambda x: norm(x[:, 1:]),
    "norm of a shift": lambda x: norm(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, 1:]),
    "norm of a convolution": lambda x: norm(
        jax.lax.conv_general_dilated(
            x, jnp.ones((3, DIM, DIM)) + jnp.eye(DIM), (2,), "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
    ),
    "a derivative that adds": shrunk,
    "a derivative that broadcasts": mean_of_tokens,
    "a derivative beside integers": lambda x: with_places(x)[0] * with_places(x)[1],
    "a tangent beside integers": of_signs,
    "keys in a scan": noisy_scan,
    "elements out of range": placed,
    "bits": both_bits,
    "one value read twice": lambda x: jnp.einsum("btd,bsd->bts", x, x) ** 2,
    "rows of tokens": lambda x: x.reshape(ROWS, 4, -1) ** 2 * jnp.arange(4.0)[:, None],
    "all tokens by place": lambda x: jnp.tanh(x[:, jnp.arange(x.shape[1])[::-1]]) * x,
    "added by place": lambda x: jnp.tanh(x.at[:, jnp.arange(12)[::-1]].add(x[:, :12])),
    "a window of computed place": lambda x: jax.lax.dynamic_slice_in_dim(
        x, jnp.int32(x.sum() > 0), 12, 1
    ) * jnp.arange(12.0)[:, None],
    "tokens in reverse": lambda x: norm(x[:, ::-1]) * x,
    "the first that is no number": lambda x: jnp.argmax(jnp.where(x > 0.5, jnp.nan, x), 1)
    * x.sum(1),
    "exponentials of -inf": lambda x: after_nothing(x) * x,
    "parts of numpy's lengths": lambda x: jnp.split(x, np.array([5]), 1)[0] ** 2,
    "some tokens by number": lambda x: x[0][
        jnp.arange(x.shape[1])[: x.shape[1] // 2], jnp.argmax(x[0, ::2], 1)
    ] ** 2,
    "stack and unstack": lambda x: jnp.stack([x, 2 * x], 2).reshape(ROWS, -1, DIM)[:, ::2],
}  # fmt: skip


def trained(case, length, **options):
    def loss(params, batch):
        return jnp.sum(CASES[case](batch @ params["w"])) / 10

    batch = np.random.default_rng(1).normal(size=(ROWS, length, DIM)).astype(np.float32)
    how = zerojax.Sequences("sequence", most_gathered=np.inf)
    plan = zerojax.plan(
        {"params": {"w": WEIGHTS}}, mesh=mesh_of({"data": 1, "sequence": 4}), sequence=how
    )
    params = plan.place({"params": {"w": WEIGHTS}})["params"]
    step = jax.jit(zerojax.value_and_grad(loss, plan))
    return step, params, batch, jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("length", [14, 16])
@pytest.mark.parametrize("case", CASES)
def test_an_operation_has_the_numbers_of_one_device(case, length):
    step, params, batch, plain = trained(case, length)
    loss, grads = step(params, batch)
    wanted, gradients = plain({"w": WEIGHTS}, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-6)
    most = np.abs(gradients["w"]).max()
    np.testing.assert_allclose(grads["w"], gradients["w"], atol=2e-5 * max(most, 1e-3))


def alibi(scores):
    heads, places = 2.0 ** -jnp.arange(1, 3), jnp.arange(scores.shape[-1])
    return scores - heads[:, None, None] * jnp.abs(places[:, None] - places)


@pytest.mark.parametrize("mask", ["causal", "slice", "alibi", "segments"])
def test_no_mask_is_whole(mask):
    length = 64

    def loss(params, batch):
        x = (batch @ params["w"]).reshape(ROWS, length, 2, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", x, jnp.sin(x))
        ids = jnp.cumsum(batch[..., 0] > 0, axis=1)
        seen = {
            "causal": lambda: jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -9.0),
            "slice": lambda: jnp.where(
                jnp.tril(jnp.ones((2 * length, 2 * length), bool))[:length, :length], scores, -9.0
            ),
            "alibi": lambda: alibi(scores),
            "segments": lambda: jnp.where((ids[:, None] == ids[..., None])[:, None], scores, -9.0),
        }[mask]()
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(seen), x).sum()

    mesh = mesh_of({"data": 1, "sequence": 4})
    plan = zerojax.plan({"params": {"w": WEIGHTS}}, mesh=mesh, sequence="sequence")
    step = zerojax.value_and_grad(loss, plan)
    jaxpr = jax.make_jaxpr(step)({"w": WEIGHTS}, np.zeros((ROWS, length, DIM), np.float32)).jaxpr
    shapes = {tuple(v.aval.shape[-2:]) for e in _compat.every_eqn(jaxpr) for v in e.outvars}
    assert (length // 4, length) in shapes or (length, length // 4) in shapes
    assert not shapes & {(length, length), (2 * length, 2 * length)}
