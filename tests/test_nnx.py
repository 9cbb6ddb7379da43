"""Flax nnx: loops keep their style; objects, with variables of every kind, change in place."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.nnx_models import BATCH, WIDTH, loss_fn, make, params_of, plain_loop, pure
from tests.support.reference import assert_close, assert_equal_bits
from tests.support.shapes import shape

MESH = make_mesh(2)


def placed(*, stage=3, offload=None, **options):
    return zerojax.nnx.shard(*make(**options), stage=stage, mesh=MESH, offload=offload)


def test_a_loop_is_what_it_is_on_one_device(compiled):
    """With statistics over the mesh axis, everything that moves is the same as in nnx's loop."""
    wanted, wanted_optimizer = make()
    losses = plain_loop(wanted, wanted_optimizer, 3)
    model, optimizer = make(axis_name="data")
    before, kernel = params_of(model), model.layers[0].kernel
    assert zerojax.nnx.shard(model, optimizer, stage=3, mesh=MESH) == (model, optimizer)
    step = zerojax.nnx.train_step(loss_fn)
    for loss in losses:
        metrics = step(model, optimizer, BATCH)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert model.layers[0].kernel is kernel, "the model's own variables are updated"
    assert not any(x.is_deleted() for x in jax.tree.leaves(before)), "the user's own arrays stay"
    assert kernel[...].sharding.spec == jax.P("data")
    moments, wanted_moments = (
        nnx.as_pure(one.opt_state)[0].mu for one in (optimizer, wanted_optimizer)
    )
    assert moments["layers"][0]["kernel"].addressable_shards[0].data.shape == (8, WIDTH)
    assert (int(model.calls[...]), int(optimizer.step[...])) == (3, 3)
    assert_close(params_of(model), params_of(wanted), 2e-5)
    assert_close(model.norm.mean[...], wanted.norm.mean[...], 1e-5)
    assert_close(model.norm.var[...], wanted.norm.var[...], 1e-5)
    assert_close(moments, wanted_moments, 2e-5)
    assert compiled.count("jit(step)") == 1


def test_nnxs_own_loop_takes_what_rests_in_host_memory():
    wanted, wanted_optimizer = make()
    model, optimizer = placed(offload=zerojax.Offload(min_bytes=0))
    assert plain_loop(model, optimizer, 2) == pytest.approx(
        plain_loop(wanted, wanted_optimizer, 2), rel=1e-5
    )
    arrays = [x for x in jax.tree.leaves(nnx.as_pure(optimizer.opt_state)) if x.ndim]
    assert {x.sharding.memory_kind for x in arrays} == {"pinned_host"}
    before = params_of(model)
    assert_close(before, params_of(wanted), 2e-5)
    zerojax.nnx.shard(model, optimizer, stage=1, mesh=MESH)  # placed again, at another stage
    assert model.layers[0].kernel[...].sharding.is_fully_replicated
    assert_equal_bits(params_of(model), before)


def test_a_placed_optimizer_prints_and_keeps_its_plan():
    _, optimizer = placed()
    assert f"wrt={nnx.Param.__name__}" in repr(optimizer)
    assert jax.tree.map(lambda leaf: leaf, optimizer.tx) == optimizer.tx
    assert copy.deepcopy(optimizer).tx == optimizer.tx


class Plain(nnx.Module):
    """Its parameters, and a table, are arrays without a variable."""

    def __init__(self, rngs, width=8):
        self.w, self.b = jax.random.normal(rngs.params(), (16, width)), jnp.zeros((width,))
        self.inner, self.table = nnx.Linear(16, 16, rngs=rngs), jnp.linspace(0, 1, width)

    def __call__(self, x):
        return self.inner(x) @ self.w + self.b + self.table


def of_names(path, value):
    return path[-1] in ("w", "b", "kernel")


def far(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@pytest.mark.parametrize("wrt", [of_names, nnx.Param], ids=["function", "class"])
def test_plain_arrays_of_a_model_are_trained_or_kept(wrt):
    (one, optimizer), make_plain = make(Plain, wrt), lambda: make(Plain, wrt)
    optimizer.update(one, nnx.grad(far, argnums=nnx.DiffState(0, wrt))(one, BATCH))
    for source in ((make_plain,), make_plain(), (make_plain,)):  # a second model, too
        model, optimizer = zerojax.nnx.shard(*source)
        zerojax.nnx.train_step(far)(model, optimizer, BATCH)
        assert_close(pure(model), pure(one), 2e-5)
    shards = model.w.addressable_shards if wrt is of_names else ()
    assert {shard.data.shape for shard in shards} <= {(2, 8)}


def test_plain_arrays_that_cannot_be_are_refused():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.w = jnp.ones((33, 15))

    for _ in range(2):
        odd = make(Odd, lambda path, value: True)
        for source in (odd, (lambda: make(Odd, lambda path, value: True),)):
            with pytest.raises(TypeError, match=r"params/w is a plain array.*a nnx.Param, or"):
                zerojax.nnx.shard(*source)
            with pytest.raises(ValueError, match=r"wrt= selects no variable.*nnx.Param"):
                zerojax.nnx.shard(lambda: make(Odd))
        assert odd[0].w.shape == (33, 15)


def test_trees_of_a_sharded_model_and_of_a_plain_one_meet():
    plain, of_plain = make(linear)
    model, optimizer = zerojax.nnx.shard(lambda: make(linear))
    for trees in ((plain, model), (of_plain, optimizer)):
        sums = jax.tree.map(jnp.add, *map(nnx.state, trees))
        assert_close(
            nnx.as_pure(sums), nnx.as_pure(jax.tree.map(lambda x: 2 * x, nnx.state(trees[0]))), 1e-6
        )


class Rows(nnx.Module):
    def __init__(self, rngs):
        self.free = nnx.Embed(16, 8, rngs=rngs)
        self.wide = nnx.Embed(16, 8, dtype=jnp.float32, rngs=rngs)


def test_rows_of_a_table_without_a_dtype_have_that_of_the_table():
    dtypes = []

    def loss(model, tokens):
        rows = model.free(tokens), model.wide(tokens)
        dtypes.append([str(r.dtype) for r in rows])
        return sum(jnp.mean(r.astype(jnp.float32) ** 2) for r in rows)

    model, optimizer = placed(make_model=Rows)
    tokens = np.arange(16)
    step = zerojax.nnx.train_step(loss, precision=zerojax.Precision(compute="bfloat16"))
    step(model, optimizer, tokens)
    assert dtypes.pop() == ["bfloat16", "float32"]
    zerojax.nnx.eval_step(loss)(model, optimizer, tokens)
    assert dtypes.pop() == ["float32"] * 2
    assert model.free.dtype == jnp.float32


def test_evaluation_in_nnx_style():
    model, optimizer = placed(rate=0.5)
    model.eval()
    before = jax.tree.map(np.asarray, params_of(model))
    evaluate = zerojax.nnx.eval_step(lambda m, x: (loss_fn(m, x), m(x)))
    metrics = evaluate(model, optimizer, BATCH)
    plain = nnx.jit(lambda model, x: model(x))(model, BATCH)  # inference with the shards
    np.testing.assert_allclose(metrics["aux"], plain, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(jnp.mean((plain - BATCH) ** 2)), rel=1e-5)
    assert_equal_bits(params_of(model), before)


@pytest.mark.parametrize("stores", [None, "split"])
def test_a_model_of_shapes_is_audited_like_one_of_arrays(stores):
    sizes = {"param": "bfloat16", "master": stores, "moments": "int8"} if stores else {}
    options = {"stage": 3, "mesh": MESH, "precision": zerojax.Precision(**sizes)}
    step = zerojax.nnx.train_step(loss_fn)
    model, optimizer = zerojax.nnx.shard(make, abstract=True, **options)
    leaves = jax.tree.leaves(pure(model)) + jax.tree.leaves(pure(optimizer))
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    report = zerojax.audit(*step.pure(model, optimizer, shape(*BATCH.shape))).check()
    real = zerojax.audit(*step.pure(*zerojax.nnx.shard(make, **options), BATCH))
    assert (report.memory, report.totals) == (real.memory, real.totals)
    again, _ = zerojax.nnx.shard(*make(), abstract=True, **options)
    assert jax.tree.leaves(pure(again)) == jax.tree.leaves(pure(model))


# -- what is refused


def linear(rngs):
    return nnx.Linear(16, 16, rngs=rngs)


def with_key(model, batch, rng):
    return jnp.mean(model(batch))


class Halving(nnx.Optimizer):
    def update(self, model, grads, **others):
        super().update(model, jax.tree.map(lambda grad: grad / 2, grads), **others)


def halving():
    model = linear(nnx.Rngs(0))
    return model, Halving(model, optax.sgd(0.1), wrt=nnx.Param)


SHARD = r"zerojax.nnx.shard\(model, optimizer"
PURE = r"\(\*step.pure\(model, optimizer, batch\)\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: zerojax.nnx.train_step(loss_fn)(*make(), BATCH),
            r"not placed. First call zerojax.nnx.shard\(model, opt.*again for a new optimizer",
        ),
        (lambda: zerojax.nnx.shard(lambda: make()[0]), rf"not only a Net. Call {SHARD}"),
        (lambda: zerojax.nnx.shard(make()[0]), rf"not only a Net. Call {SHARD}"),
        (lambda: zerojax.nnx.shard((*make(), 1), stage=3), rf"not only a tuple. Call {SHARD}"),
        (
            lambda: zerojax.nnx.shard(make()[0], optax.adam(1e-3)),
            r"not a nnx.Optimizer. Make one: nnx.Optimizer\(model",
        ),
        *(
            (lambda args=args: zerojax.nnx.shard(*args()), r"Halving overrides.*chain\(\.\.\., tx")
            for args in (halving, lambda: (halving,))
        ),
        *(
            (lambda state=state: zerojax.shard_train_state(state()), rf"{SHARD}, stage=3\)")
            for state in (lambda: make(linear)[0], lambda: make(linear), lambda: make)
        ),
        (
            lambda: zerojax.nnx.train_step(with_key)(*placed(make_model=linear), BATCH),
            r"calls the loss with \(model, batch\): .*'rng'.*key\(n\)",
        ),
        (lambda: zerojax.verify(zerojax.nnx.train_step(loss_fn), *placed()), PURE),
        (lambda: zerojax.audit(zerojax.nnx.train_step(loss_fn), *placed()), PURE),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
