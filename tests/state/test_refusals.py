"""Messages about states: those that are gone, are none, or go into checkpoints; and of nnx."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.support.linear import BATCH, EVAL, STEP, loss, made, placed
from tests.support.nnx_models import linear, make
from tests.support.reference import train_state
from tests.support.shapes import shape

W = np.arange(-2, 2, dtype="f")
SGD = optax.sgd(0.1)


def test_a_step_of_two_variables_with_one_array():
    model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
    model.target = nnx.BatchStat(model.kernel.get_value())
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=0)
    step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x)) + jnp.sum(model.target[...]))
    step(model, optimizer, BATCH)
    model.target.set_value(model.kernel.get_value())
    with pytest.raises(ValueError, match=r"params/kernel and variables/values/target are one"):
        step(model, optimizer, BATCH)


def test_a_donated_state_is_refused_wherever_it_is_passed(tmp_path):
    state = placed()
    new, _ = STEP(state, BATCH)
    path = str(tmp_path / "there")
    uses = {
        "step": lambda s: STEP(s, BATCH),
        "eval": lambda s: EVAL(s, BATCH),
        "save": lambda s: zerojax.save(path, s),
        "export": lambda s: zerojax.checkpoint.export_safetensors(path, s),
        "verify": lambda s: zerojax.verify(STEP, s, BATCH),
        "gather": zerojax.gather_params,
        "shard": zerojax.shard_train_state,
        "place": lambda s: zerojax.plan(s).place(s),
    }
    with zerojax.Checkpoints(tmp_path / "all") as checkpoints:
        uses["checkpoints"] = lambda s: checkpoints.save(1, s, force=True)
        for name, use in uses.items():
            with pytest.raises(ValueError, match=r"donated.*state, metrics = step\(") as raised:
                use(state)
            assert "state leaf step is gone" in str(raised.value), name
    assert list(tmp_path.iterdir()) == [tmp_path / "all"], "no half file"
    new.params["w"].delete()
    for step in (STEP, EVAL):
        with pytest.raises(ValueError, match=r"state leaf params/w is gone"):
            step(new, BATCH)
    assert not new.step.is_deleted()


def with_a_batch_that_is_gone():
    batch = {"x": zerojax.shard_batch(BATCH)}
    batch["x"].delete()
    zerojax.train_step(lambda params, batch: loss(params, batch["x"]))(placed(), batch)


def with_parameters_in_one_array():
    state = train_state(np.ones((64, 16), "f"), optax.sgd(0.1))
    step = zerojax.train_step(lambda w, batch: jnp.mean((batch @ w) ** 2))
    step(zerojax.shard_train_state(state), BATCH)


def updated_by(tx):
    return lambda: STEP(placed(tx), BATCH)


def asking(wants):
    return lambda: zerojax.train_step(wants)(placed(), BATCH)


TAKES = r"in addition to the gradients.*zerojax.value_and_grad.*docs/loop.md"
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
BY_NAME = r"jax.random.key\(n\).*by name: mutable="


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (with_a_batch_that_is_gone, r"batch leaf x was donated.*Pass a new batch"),
        (with_parameters_in_one_array, r"are one array.*into a dict, params={'w': w}"),
        (updated_by(optax.lbfgs()), rf"takes value=, grad=, value_fn= {TAKES}"),
        (updated_by(PLATEAU), rf"takes value= {TAKES}"),
        (asking(lambda p, x, *, stats: 0.0), rf"missing .*'stats'.*{BY_NAME}\('stats',\)"),
        (asking(lambda p, x, key, ema: 0.0), rf"missing .*'ema'.*{BY_NAME}\('ema',\)"),
    ],
)
def test_steps_say_what_they_cannot_do(call, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        call()


OTHER = r"tx= is another optimizer than that of the state.*Leave tx= out.*state.replace\(tx=tx"


@pytest.mark.parametrize(
    "use",
    [
        lambda tx: zerojax.plan(made(), tx=tx),
        lambda tx: zerojax.shard_train_state(made, tx=tx),
        lambda tx: zerojax.shard_train_state(placed(), tx=tx),
        lambda tx: zerojax.train_step(loss, tx=tx)(placed(), BATCH),
        lambda tx: zerojax.verify(zerojax.train_step(loss, tx=tx), placed(), BATCH),
        lambda tx: zerojax.audit(zerojax.train_step(loss, tx=tx), placed(), BATCH),
    ],
)
def test_an_optimizer_beside_that_of_the_state_is_refused(use):
    with pytest.raises(ValueError, match=OTHER):
        use(optax.sgd(5.0))


def test_the_optimizer_of_the_state_may_be_passed_too():
    state = placed(SGD)
    zerojax.plan(state, tx=SGD)
    new, _ = zerojax.train_step(loss, tx=SGD)(state, BATCH)
    assert int(new.step) == 1


class Unnamed:
    """A class whose fields JAX cannot name."""

    def __init__(self, params, opt_state):
        self.params, self.opt_state = params, opt_state


jax.tree_util.register_pytree_node(
    Unnamed, lambda s: ((s.params, s.opt_state), None), lambda _, parts: Unnamed(*parts)
)
AS_DICT = {"params": {"w": W}, "opt_state": ()}
WHOLE = r"is a whole state, a TrainState.*by itself: .*shard_train"
NONE = r"no parameters.*Pass a flax TrainState"


@pytest.mark.parametrize(
    ("tree", "remedy"),
    [
        ((made(), made()), rf"element 0 of this tuple {WHOLE}"),
        ([made(), made()], r"this list is a whole state"),
        ((AS_DICT, AS_DICT), r"element 0 of this tuple is a whole state, a dict"),
        ({"state": made(), "n": 0}, r"entry 'state' of this dict is a whole state. Pass only"),
        ([{"w": W}, ()], r"state of type list has no parameters.*a tuple"),
        ({"params": {"a": {"b": W}, "a/b": W}}, r"both named params/a/b. Rename one"),
        (Unnamed({"w": W}, ()), r"fields of Unnamed. Register it with.*register_dataclass"),
        ({"weights": shape(16, 16)}, NONE),
        (None, NONE),
        ({}, NONE),
        ({"params": {"empty": ()}}, NONE),
        ({"params": {"name": "x"}}, r"params/name is the string 'x'.*static field"),
        ({"params": {"f": len}}, r"params/f is a builtin.*static field"),
    ],
)
def test_trees_that_are_no_states(tree, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        zerojax.plan(tree)
    with pytest.raises((ValueError, TypeError), match=remedy):
        zerojax.shard_train_state(tree)


@pytest.mark.parametrize("key", ["a/b", "a.b"])
def test_leaves_of_one_name_are_refused(tmp_path, key):
    params = {"a": {"b": W}, key: W + 1}
    with zerojax.Checkpoints(tmp_path / "all") as checkpoints:
        for use in (
            lambda: zerojax.save(tmp_path / "c", params),
            lambda: checkpoints.save(1, params),
            lambda: zerojax.checkpoint.export_safetensors(tmp_path / "w", params),
        ):
            with pytest.raises(ValueError, match=r"a.*b.* (are both|consist of).*Rename one"):
                use()
    assert not (tmp_path / "c").exists() and not (tmp_path / "w").exists()


# -- checkpoints


def no_trees():
    """What a restore could not give back, with the remedy, by what it is."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = r"Save zerojax.nnx.state\(model, optimizer\).*with zerojax.nnx.update\(model, opt"
    yield model, rf"is a Flax nnx object, Linear,.*{state}"
    yield (model, optimizer), rf"has a Flax nnx object, Linear,.*{state}"
    yield {"params": {}, "optimizer": optimizer}, rf"nnx object, Optimizer,.*{state}"
    yield optax.sgd(0.1), r"init is a function, not an array.*no optimizers.*pass the state"
    yield {"w": W, "tx": optax.sgd(0.1)}, r"tx/init is a function.*no optimizers.*that their init"
    yield optax.sgd, r"is a function.*(Pass zerojax.plan\(make_state|pass the state)"
    for number in (3, 0.5, True, np.float32(3)):
        yield number, r"is (3|0.5|True|np.float32.*), not a tree of arrays.*as metadata="
    for empty in (None, [], {}, {"a": ()}, placed().tx):
        yield empty, r"has no leaves, so .*You passed a \w+ without arrays; pass one with"
    yield {"w": np.zeros(2, "datetime64[D]")}, r"w is a ndarray of datetime64\[D\], not an array"
    yield {"w": np.zeros(2, "i4,f4")}, r"w is a ndarray of .*, not an array. Make it a static"
    yield {"w": np.zeros(2, jax.dtypes.float0)}, r"w is a ndarray of .*, not an array. Make it"


def test_checkpoints_take_trees_of_arrays_and_nothing_else(tmp_path):
    zerojax.save(tmp_path / "there", {"w": W})
    with zerojax.Checkpoints(tmp_path / "loop") as checkpoints:
        for tree, message in no_trees():
            for use in (
                lambda tree: zerojax.save(tmp_path / "new", tree),
                lambda tree: checkpoints.save(1, tree),
                lambda tree: zerojax.restore(tmp_path / "there", like=tree),
                checkpoints.resume,
            ):
                with pytest.raises((TypeError, ValueError), match=message):
                    use(tree)
        assert checkpoints.steps() == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("integers", [2**40, np.full(2, 2**40), np.uint64(2**63)])
def test_numbers_that_jax_cuts_off_are_not_saved_as_others(tmp_path, integers):
    message = r"n has integers that JAX truncates.*jax_enable_x64. Set that, or .*metadata="
    with pytest.raises(ValueError, match=message):
        zerojax.save(tmp_path / "c", {"n": integers})
    for floats in (1e-46, np.array([1, 1e39])):  # 0 and infinity in float32
        with pytest.raises(ValueError, match=message.replace("integers", "floats")):
            zerojax.save(tmp_path / "c", {"n": floats})
    zerojax.save(tmp_path / "f", {"n": np.array([0.1, np.inf, 0])})
    zerojax.save(tmp_path / "c", {"n": np.full(2, 2**31 - 1)})
    assert list(zerojax.restore(tmp_path / "c", {"n": np.zeros(2, int)})["n"]) == [2**31 - 1] * 2


def test_what_is_callable_and_has_arrays_comes_back(tmp_path):
    """As Equinox's modules are, and `Partial`, whose constructor Orbax cannot call."""
    calls = jax.tree_util.Partial(operator.mul, W, nested=jax.tree_util.Partial(abs, W + 1))
    zerojax.save(tmp_path / "c", {"calls": calls})
    back = zerojax.restore(tmp_path / "c", {"calls": jax.tree.map(jnp.zeros_like, calls)})["calls"]
    assert back.func is operator.mul and (back.args[0] == W).all()
    assert (back.keywords["nested"]() == abs(W + 1)).all()


# -- steps of Flax nnx


def noisy(model, x, rngs):
    return jnp.mean(model(x) ** 2) + rngs.noise.uniform()


def left_split(model, x, rngs):
    nnx.split_rngs(rngs, splits=3)
    return jnp.mean(model(x))


def adding(model, x):
    model.hidden = nnx.Intermediate(x)
    return jnp.mean(model(x))


def assigning(model, x):
    nnx.jit(lambda linear: nnx.update(linear, jax.tree.map(jnp.tanh, nnx.state(linear))))(model)
    return jnp.mean(model(x))


def transposing(model, x):
    model.kernel[...] = model.kernel[...].T
    return jnp.mean(model(x))


def stacking(model, x):
    kernel = model.kernel[...].T
    model.kernel.set_value(jax.lax.scan(lambda c, _: (c, kernel), 0, length=16)[1].T)
    return jnp.mean(x)


def swapping(model, x):
    pair = model.kernel[...], jnp.tanh(model.kernel[...])
    (_, new), _ = jax.lax.scan(lambda pair, _: (pair[::-1], None), pair, length=2)
    model.kernel.set_value(new)
    return jnp.mean(x)


METRICS = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
X, RNGS = np.ones((16, 16), "f"), nnx.Rngs(0)


@pytest.mark.parametrize(
    ("loss", "args", "remedy"),
    [
        (noisy, (METRICS, X), r"\(model, optimizer, batch\) or.*a MultiMetric is.*metrics.upd"),
        (noisy, (X, METRICS), r"values = step\(model, optimizer, batch\); metrics.upd"),
        (noisy, (X, linear(RNGS)), r"a Linear is neither.*close over it"),
        (noisy, ({"x": X, "rngs": RNGS},), r"would not advance there. Pass it after the batch"),
        (adding, (X, X), r"leave it out, step\(model, optimizer, batch\).*several"),
        (adding, (X,), r"added the variable hidden.*Make it with the model"),
        (assigning, (X,), r"assigns the parameter (bias|kernel) of.*after the step.*BatchStat"),
        (transposing, (X,), r"assigns the parameter kernel of"),
        (stacking, (X,), r"assigns the parameter kernel of"),
        (swapping, (X,), r"assigns the parameter kernel of"),
        (left_split, (X, RNGS), r"another shape. Undo.*restore_rngs\(backups\)"),
    ],
)
def test_steps_of_nnx_say_what_they_take(loss, args, remedy):
    model, optimizer = zerojax.nnx.shard(*make(linear))
    with pytest.raises((ValueError, TypeError), match=remedy):
        zerojax.nnx.train_step(loss)(model, optimizer, *args)
    assert not model.kernel[...].is_deleted()


class Layers(nnx.Module):
    def __init__(self, axis):
        self.axis = nnx.StateAxes({nnx.Param: axis, ...: axis})
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        make = nnx.vmap(lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key)), out_axes=self.axis)
        self.stack = make(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        norm = nnx.jit(lambda norm, x: norm(x))
        layer = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
        x = nnx.cond(x.sum() > 0, norm, lambda norm, x: norm(x), self.norm, x)
        return nnx.scan(layer, in_axes=(nnx.Carry, self.axis), out_axes=nnx.Carry)(x, self.stack)


@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_that_transforms_return_are_not_assigned(axis):
    model = Layers(axis)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer)
    step, *args = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x))).pure(
        model, optimizer, X
    )
    step.trace(*args)


def test_streams_that_the_model_holds_are_not_passed_too():
    model, _ = make(linear)
    model.rngs = nnx.Rngs(0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer)
    with pytest.raises(ValueError, match=r"holds the nnx.Rngs.*Leave it out, step\(model, opt"):
        zerojax.nnx.train_step(noisy)(model, optimizer, X, model.rngs)
