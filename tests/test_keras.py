"""Keras's `fit`, `evaluate` and `predict` on 8 devices give the numbers of one device."""

import functools
import os

import jax
import numpy as np
import pytest

import zerojax
import zerojax.keras
from tests.foreign import keras_hub

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is missing: pip install 'zerojax[keras]'")
layers = keras.layers
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend; set KERAS_BACKEND=jax", allow_module_level=True)

# Keras's arrays ignore NumPy's `copy=`.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
random = np.random.default_rng(0)
# 8 devices do not divide the last batch of 20.
X, Y = (random.normal(size=(52, width)).astype(np.float32) for width in (16, 8))
WEIGHTS = random.uniform(size=52).astype(np.float32)
FIT = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}


def dense(*more, units=64):
    return [layers.Input((16,)), layers.Dense(units, activation="relu", name="up"), *more]


def compiled(*hidden, optimizer="adam", loss="mse", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([*dense(*hidden), layers.Dense(8, name="down")], name="model")
    model.compile(optimizer, loss, **options)
    return model


def values(model):
    """The variables of a model and its optimizer, without those of random numbers."""
    of = [v for v in model.variables if v.dtype != "uint32"] + model.optimizer.variables
    return [v.numpy() for v in of]


def assert_close(have, want, rtol=1e-5, atol=1e-6):
    near = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(lambda a, b: near(np.asarray(a), np.asarray(b)), have, want)


def both(make):
    """A model on one device, and the same on all."""
    return make(), zerojax.keras.shard(make(), stage=3)


o = keras.optimizers
OPTIMIZERS = {
    "clipped by the norm of all": lambda: o.AdamW(1e-2, global_clipnorm=0.1),
    "clipped one by one": lambda: o.Adam(1e-2, clipnorm=0.01),
    "schedule": lambda: o.SGD(o.schedules.CosineDecay(0.1, 9), momentum=0.9, weight_decay=0.01),
    "factored": lambda: o.Adafactor(1e-2),
    "averages": lambda: o.Adam(use_ema=True, gradient_accumulation_steps=2, loss_scale_factor=8.0),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_trains_as_on_one_device(kind):
    make = lambda: compiled(optimizer=OPTIMIZERS[kind](), metrics=["mae"])
    one, sharded = both(make)
    want, have = (m.fit(X, Y, sample_weight=WEIGHTS, **FIT).history for m in (one, sharded))
    assert_close(have, want, rtol=1e-5)
    assert_close(values(sharded), values(one), rtol=1e-4, atol=1e-5)
    kernel = sharded.get_layer("up").kernel
    slots = [v for v in sharded.optimizer.variables if v.shape == kernel.shape]
    for v in (kernel, *slots):
        assert v.value.addressable_shards[0].data.size == v.value.size // 8, v.path


def test_evaluate_predict_callbacks_and_save(tmp_path):
    def make():
        return compiled(metrics=["mae"], steps_per_execution=2)

    one, sharded = both(make)
    for model in (one, sharded):
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        model.fit(X, Y, validation_data=(X[:9], Y[:9]), callbacks=[rates], **FIT)
    assert_close(sharded.history.history, one.history.history, rtol=1e-5)
    assert_close(sharded.evaluate(X, Y, verbose=0), one.evaluate(X, Y, verbose=0), rtol=1e-5)
    want = one.predict(X, verbose=0)
    assert_close(sharded.predict(X, verbose=0), want, rtol=1e-4, atol=1e-5)
    assert_close(sharded.predict_on_batch(X[:3]), want[:3], rtol=1e-4, atol=1e-5)
    assert_close(sharded.train_on_batch(X, Y), one.train_on_batch(X, Y), rtol=1e-5)
    assert_close(sharded.test_on_batch(X, Y), one.test_on_batch(X, Y), rtol=1e-5)
    sharded.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    assert_close(values(read), values(sharded), rtol=0, atol=0)


def test_several_outputs_with_losses_of_their_own():
    def make():
        keras.utils.set_random_seed(0)
        x = layers.Input((16,))
        regularized = {"activity_regularizer": "l1", "kernel_regularizer": "l2"}
        h = layers.Dense(64, activation="relu", **regularized)(x)
        p, q = layers.Dense(8)(h), layers.Dense(1, activation="sigmoid")(h)
        model = keras.Model(x, {"p": p, "q": q})
        losses = {"p": "mse", "q": "binary_crossentropy"}
        model.compile("adam", losses, metrics={"q": ["auc"]}, weighted_metrics={"p": ["mae"]})
        return model

    y = {"p": Y, "q": np.float32(Y[:, :1] > 0)}
    weights = dict.fromkeys(y, WEIGHTS)
    one, sharded = both(make)
    want, have = (m.fit(X, y, sample_weight=weights, **FIT).history for m in (one, sharded))
    assert want.keys() == have.keys() > {"p_loss", "q_loss", "q_auc", "p_mae"}
    assert_close(have, want, rtol=1e-4)


def test_layers_with_a_state_of_their_own():
    hidden = layers.BatchNormalization(name="norm"), layers.Dropout(0.5, name="drop")
    sharded = zerojax.keras.shard(compiled(*hidden))
    seed = sharded.get_layer("drop").seed_generator.state
    before = seed.numpy()
    sharded.fit(X[:32], Y[:32], batch_size=32, epochs=3, verbose=0)
    np.testing.assert_array_equal(seed.numpy(), before + np.uint32([0, 3]))  # as Keras counts
    # The devices see 4 rows each; the mean of their means is that of all.
    step, state, batch, key = zerojax.keras.pure(sharded, (X[:32], Y[:32]))
    zerojax.verify(step, state, batch, key, whole_batch=False).check()
    mean, hidden = sharded.get_layer("norm").moving_mean, sharded.get_layer("up")(X[:32])
    before = mean.numpy()
    sharded.optimizer.learning_rate = 0.0
    sharded.train_on_batch(X[:32], Y[:32])
    assert_close(mean.numpy(), 0.99 * before + 0.01 * np.mean(hidden, axis=0), rtol=1e-4, atol=1e-6)


def test_each_device_drops_other_elements():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), layers.Dense(8)])
    model.compile("sgd", "mse", metrics=["mae"])
    zerojax.keras.shard(model)
    step, *args = zerojax.keras.pure(model, (np.ones((8, 64), np.float32), Y[:8]))
    _, metrics = step(*args)
    assert len(np.unique(np.asarray(metrics["aux"]["y_pred"]), axis=0)) == 8


def test_frozen_weights_are_sharded_and_stay():
    def make():
        model = compiled()
        model.get_layer("up").trainable = False
        model.compile("adam", "mse")
        return model

    one, sharded = both(make)
    kernel = sharded.get_layer("up").kernel
    assert kernel.value.addressable_shards[0].data.size == kernel.value.size // 8
    before = [v.numpy() for v in sharded.get_layer("up").variables]
    want, have = (model.fit(X, Y, **FIT).history for model in (one, sharded))
    assert_close(have, want, rtol=1e-5)
    after = [v.numpy() for v in sharded.get_layer("up").variables]
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_model_is_born_sharded_and_forecast():
    sharded = zerojax.keras.shard(lambda: compiled(metrics=["mae"]))
    one = compiled(metrics=["mae"])
    one.optimizer.build(one.trainable_variables)
    assert_close(values(sharded), values(one), rtol=1e-6)
    want, have = (model.fit(X, Y, **FIT).history for model in (one, sharded))
    assert_close(have, want, rtol=1e-5)
    shapes = jax.eval_shape(zerojax.keras.pure(compiled, (X, Y))[1])
    assert shapes.opt_state["momentum"]["model/up/kernel"].shape == (16, 64)


class Noise(layers.Layer):
    """Draws random numbers in `evaluate` and `predict`, too, as of a VAE."""

    def build(self, _):
        self.draws = keras.random.SeedGenerator(0, name="draws")

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.draws)


def test_verify_compares_no_dropout_of_the_whole_batch():
    """Keras makes its keys of numbers, so draws cannot be made alike."""
    model = zerojax.keras.shard(compiled(layers.Dropout(0.3)), stage=3)
    result = zerojax.verify(*zerojax.keras.pure(model, (X[:32], Y[:32])))
    result.check()
    assert any("another sample" in note for note in result.notes)


def test_batches_of_an_evaluation_draw_other_numbers():
    one, sharded = both(lambda: compiled(Noise(name="noise")))
    outputs = sharded.predict(np.zeros((64, 16)), batch_size=32, verbose=0)
    assert np.all(np.any(outputs[:32] != outputs[32:], axis=1))
    losses = [sharded.evaluate(X[:32], Y[:32], verbose=0) for _ in range(2)]
    assert losses[0] != losses[1]
    one.predict(np.zeros((64, 16)), batch_size=32, verbose=0)
    one.evaluate(X[:32], Y[:32], verbose=0), one.evaluate(X[:32], Y[:32], verbose=0)
    states = [model.get_layer("noise").draws.state.numpy() for model in (one, sharded)]
    np.testing.assert_array_equal(*states)


class Measures(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"spread": keras.ops.std(y_pred)}


def test_metrics_of_ones_own_see_the_outputs():
    def make():
        keras.utils.set_random_seed(0)
        model = Measures(dense(layers.Dense(8)), name="model")
        model.compile("adam", "mse")
        return model

    want, have = (model.train_on_batch(X, Y, return_dict=True) for model in both(make))
    assert_close(have, want, rtol=1e-5)


def test_another_compile_keeps_zerojax():
    """Of Keras's three calls, whichever is first."""

    def again(model):
        model.compile(o.AdamW(1e-2), "mae", metrics=["mse"])
        return model

    one, sharded = both(compiled)
    for model in (one, sharded):
        model.fit(X, Y, **FIT)
    schedule = sharded.train_function.steps[4][8].recipe.options.schedule
    want, have = (again(model).evaluate(X, Y, verbose=0) for model in (one, sharded))
    assert_close(have, want)
    want, have = (model.fit(X, Y, **FIT).history for model in (one, sharded))
    assert_close(have, want, rtol=1e-5)
    slots = [v for v in sharded.optimizer.variables if v.shape == (16, 64)]
    for v in (sharded.get_layer("up").kernel, *slots):
        assert v.value.addressable_shards[0].data.size == v.value.size // 8, v.path
    step, *_ = zerojax.keras.pure(sharded, (X, Y))
    assert step.recipe.options.schedule == schedule and len(slots) == 2
    want = again(one).predict(X, verbose=0)
    assert zerojax.keras.pure(again(sharded), (X, Y))[0] is not step
    assert_close(again(sharded).predict(X, verbose=0), want, rtol=1e-4, atol=1e-5)
    sharded.compile("adam", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="run_eagerly=True"):
        sharded.fit(X, Y, verbose=0)


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_that_freeze_or_thaw_after_shard_are_refused(trainable):
    model = compiled()
    model.get_layer("up").trainable = not trainable
    model.compile("adam", "mse")
    zerojax.keras.shard(model).fit(X[:8], Y[:8], verbose=0)
    model.get_layer("up").trainable = trainable
    with pytest.raises(ValueError, match=r"Call model.compile again"):
        model.fit(X[:8], Y[:8], verbose=0)
    model.compile("adam", "mse")
    before = model.get_layer("up").kernel.numpy()
    model.fit(X[:8], Y[:8], verbose=0)
    assert np.array_equal(model.get_layer("up").kernel.numpy(), before) != trainable


class Trains(keras.Model):
    def train_step(self, state, data):
        return {}, state


class Predicts(keras.Sequential):
    def predict_step(self, state, data):
        return super().predict_step(state, data)


def with_step():
    model = Predicts(dense(layers.Dense(8)), name="model")
    model.compile("adam", "mse")
    return model


@pytest.mark.slow  # `make foreign` installs KerasHub
@pytest.mark.parametrize("name", keras_hub.MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_of_keras_hub_train_as_on_one_device(name):
    pytest.importorskip("keras_hub", reason="KerasHub is missing: `make foreign` installs it")

    def make():
        keras.utils.set_random_seed(1)
        return keras_hub.MODELS[name]()

    x, y, weights = keras_hub.batch(name)
    one, sharded, born = make(), zerojax.keras.shard(make()), zerojax.keras.shard(make)
    trained = [
        m.fit(x, y, sample_weight=weights, **FIT | {"batch_size": 16}) for m in (one, sharded, born)
    ]
    for model, history in zip((sharded, born), trained[1:], strict=True):
        assert_close(history.history, trained[0].history, rtol=1e-4)
        assert_close(values(model), values(one), rtol=1e-3, atol=1e-4)
        cut = [v for v in model.trainable_variables if v.value.sharding.is_fully_replicated]
        assert sum(v.value.size for v in cut) < 0.2 * model.count_params()


def spectral():
    return compiled(layers.SpectralNormalization(layers.Dense(8)))


def masked():
    words = layers.Input((6,), dtype="int32")
    model = keras.Model(words, layers.Dense(8)(layers.Embedding(9, 64, mask_zero=True)(words)))
    model.compile("adam", "mse")
    return model


IDS = np.ones((8, 6), np.int32)
REFUSED = {
    "with another reduction": (
        lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        "reduction='sum_over_batch_size'",
    ),
    "over all rows": (
        lambda: compiled(loss=keras.losses.Dice()),
        r"loss dice over all rows.*Dice\(axis=\(1, 2, 3\)\)",
    ),
    "over pairs of rows": (lambda: compiled(loss="circle"), "loss circle over all rows"),
    "that ignores a class": (
        lambda: compiled(loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0)),
        "Pass them a sample_weight= of 0",
    ),
    "with a predict_step": (with_step, "has a predict_step .*Override compute_loss"),
    "not compiled": (lambda: keras.Sequential(dense()), "First call model.compile"),
    "eager": (lambda: compiled(run_eagerly=True), "run_eagerly=True. Leave it out"),
    "not built": (lambda: keras.Sequential(dense()[1:]), "is not built. Call model.build"),
    "no model": (lambda: 1, "takes a keras.Model"),
    "in float16": (
        lambda: compiled(optimizer=o.LossScaleOptimizer(o.Adam())),
        "Use the policy mixed_bfloat16",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what):
    make, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        zerojax.keras.shard(make())


@pytest.mark.parametrize(
    ("make", "x", "y", "message"),
    [
        (masked, IDS, np.ones((8, 6, 8)), "Pass it as sample_weight="),
        (spectral, X[:8], Y[:8], "vector_u .* the model updates it in a call"),
    ],
)
def test_what_a_trace_shows_is_refused(make, x, y, message):
    model = zerojax.keras.shard(make())
    before = values(model)
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0)
    assert_close(values(model), before, rtol=0, atol=0)


def test_a_model_keeps_its_values_after_an_error():
    """In the second of two steps that Keras asks for at once, whose first has donated its state."""

    def batches(count):
        yield from [(X[:32], Y[:32])] * count
        raise RuntimeError("no more rows")

    one, sharded = both(lambda: compiled(steps_per_execution=2))
    with pytest.raises(RuntimeError, match="no more rows"):
        sharded.fit(batches(3), steps_per_epoch=4, shuffle=False, verbose=0)
    for _ in range(3):
        one.train_on_batch(X[:32], Y[:32])
    assert int(sharded.optimizer.iterations) == 3
    assert_close(values(sharded), values(one), rtol=1e-4, atol=1e-5)
    before = values(sharded)
    for call in (sharded.evaluate, sharded.predict):
        with pytest.raises(RuntimeError, match="no more rows"):
            call(batches(3), steps=4, verbose=0)
    assert_close(values(sharded), before, rtol=0, atol=0)


def test_models_that_zerojax_does_not_train_are_refused():
    with pytest.raises(ValueError, match="Leave param=, master="):
        zerojax.keras.shard(compiled(), precision=zerojax.Precision(moments="int8"))
    with pytest.raises(ValueError, match=r"First call zerojax\.keras\.shard"):
        zerojax.keras.pure(compiled(), (X, Y))
    with pytest.raises(ValueError, match="Override compute_loss"):
        model = Trains()
        model.compile("adam", "mse")
        model.add_weight(shape=(8,))
        zerojax.keras.shard(model)
