"""Steps that are compiled before the loop, kept in files, and loaded; and JAX's own cache."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support import nnx_models
from tests.support.processes import python
from tests.support.reference import assert_close, train_state

TX = optax.adam(1e-2)
ROWS = np.linspace(-1, 1, 16 * 32, dtype="f").reshape(16, 32)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def make():
    return train_state({"w": jnp.ones((32, 64))}, TX)


def placed(stage=3, devices=8):
    return zerojax.shard_train_state(make, stage=stage, mesh=make_mesh(devices))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("steps") / "in" / "a new folder" / "step.bin"
    zerojax.train_step(loss).compile(placed(), ROWS).save(file)
    return file


def test_a_step_is_compiled_saved_and_loaded(tmp_path, compiled):
    """Loaded, it compiles nothing, gives the numbers of the step, and donates the state."""
    file, step = tmp_path / "step.bin", zerojax.train_step(loss)
    step.compile(placed().tx.plan.abstract(), jax.ShapeDtypeStruct((16, 32), "float32")).save(file)
    wanted = step(placed(), ROWS)
    del compiled[:]
    state = placed()
    loaded = zerojax.train_step(loss).load(file, state, ROWS)
    loaded.save(file)
    loaded = zerojax.train_step(loss).load(file, state, ROWS)
    found = loaded(state, ROWS)
    assert "jit(step)" not in compiled and state.params["w"].is_deleted()
    assert_close(found, wanted, 0)
    state, metrics = loaded(found[0], 2 * ROWS)
    assert metrics["loss"] > 3 * wanted[1]["loss"] and int(state.step) == 2
    assert state.params["w"].sharding == wanted[0].params["w"].sharding
    assert repr(loaded) == "<zerojax compiled step for 8 x cpu>"
    assert loaded.memory_analysis().alias_size_in_bytes and "all-gather" in loaded.as_text()
    with pytest.raises(TypeError, match=r"'batch' compiled with float32\[16,32\] and called with"):
        loaded(state, ROWS[:, :16])


def replicated():
    return jax.sharding.NamedSharding(make_mesh(8), jax.sharding.PartitionSpec())


CALLED_WITH = {
    "a smaller batch": lambda: (placed(), ROWS[:8]),
    "another plan": lambda: (placed(stage=2), ROWS),
    "another place": lambda: (jax.device_put(placed(), replicated()), ROWS),
    "a key": lambda: (placed(), ROWS, jax.random.key(0)),
}


@pytest.mark.parametrize("name", CALLED_WITH)
def test_a_compiled_step_says_what_it_is_for(name, saved):
    step = zerojax.train_step(loss).load(saved, placed(), ROWS)
    with pytest.raises((TypeError, ValueError)) as raised:
        step(*CALLED_WITH[name]())
    (note,) = getattr(raised.value, "__notes__", [""])
    assert note.endswith("compile that for them too: step.compile(state, batch).")


OTHERS = {
    "the program": lambda: (lambda params, x: loss(params, x) * 2, placed(), ROWS),
    "the stage": lambda: (loss, placed(stage=2), ROWS),
    "the devices": lambda: (loss, placed(devices=4), ROWS),
    "the shapes of the batch": lambda: (loss, placed(), ROWS[:8]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_compiled_for_something_else_is_refused(name, saved):
    other, state, rows = OTHERS[name]()
    with pytest.raises(ValueError, match=f"for something else:(.|\n)*  {name}: ") as raised:
        zerojax.train_step(other).load(saved, state, rows)
    text = str(raised.value)
    assert " there, " in text and "here: step.compile(state, batch).save(path)." in text
    assert "the version of JAX" not in text
    assert ("the learning rate" in text) == (name == "the program")


FORMS = {
    "on the host": lambda rows, plan: rows,
    "placed": lambda rows, plan: zerojax.shard_batch(rows, like=plan),
    "shapes": lambda rows, plan: zerojax.aot.batch(rows, plan),
    "on one device": lambda rows, plan: jnp.asarray(rows),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_may_rest_elsewhere_there_and_here(kind, tmp_path):
    """In whatever form a step takes it: the program is the same."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    plan = zerojax.plan(make, stage=3, mesh=mesh)
    drawn = lambda params, x, key: loss(params, x * jax.random.bernoulli(key, 0.5, x.shape))
    step, key = zerojax.train_step(drawn), jax.random.key(1)
    batches = {name: form(ROWS, plan) for name, form in FORMS.items()}
    files = {name: tmp_path / name for name in FORMS}
    for name, batch in batches.items():
        step.compile(plan.abstract(), batch, key).save(files[name])
    programs = {name: file.read_bytes().split(b"\n")[1] for name, file in files.items()}
    facts = {json.loads(header)[1]["the program"] for header in programs.values()}
    assert len(facts) == 1
    wanted = step(plan.place(make), ROWS, key)
    for name in ("on the host", "placed"):
        others = batches["placed" if name == "on the host" else "on the host"]
        loaded = step.load(files[name], plan.abstract(), others, key)
        assert_close(loaded(plan.place(make), others, key), wanted, 0)


def test_a_batch_that_rests_otherwise_is_named(saved):
    rows = jax.device_put(ROWS, replicated())
    with pytest.raises(ValueError, match=r"the program: .*, where the batch is, or"):
        zerojax.train_step(loss).load(saved, placed(), rows)


@pytest.mark.parametrize("of", ["everyone", "another"])
def test_a_file_that_others_can_write_to_is_refused(of, saved, tmp_path, monkeypatch):
    """Before anything of it is read."""
    if of == "another" and os.geteuid():
        pytest.skip("only root can give a file away")
    shutil.copy(saved, file := tmp_path / "step.bin")
    file.chmod(0o666) if of == "everyone" else os.chown(file, 4321, -1)
    says = r"everyone can write to \S+ \(mode 666\)|\S+ belongs to user 4321"
    says = rf"^({says}), and a compiled step holds code.* yours alone: install -m 600 \S+ step"
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=says):
        patch.setattr(pathlib.Path, "read_bytes", None)
        zerojax.train_step(loss).load(file, placed(), ROWS)
    before = os.umask(0)
    zerojax.train_step(loss).load(saved, placed(), ROWS).save(file)
    os.umask(before)
    zerojax.train_step(loss).load(file, placed(), ROWS)


@pytest.mark.parametrize("how", ["step", "compiled", "loaded"])
def test_state_in_host_memory_stays_there_on_axes_of_two_types(how, tmp_path):
    """JAX says that its replicated arrays are not."""
    mesh = jax.make_mesh((4, 2), ("node", "gpu"), axis_types=(AxisType.Auto, AxisType.Explicit))
    params = {"scale": jnp.ones(3), "w": jnp.ones((32, 64)) / 9}
    make = lambda: train_state(params, TX)
    offload = zerojax.Offload(params=True, min_bytes=0)
    plan = zerojax.plan(make, stage=3, mesh=mesh, axis=("node", "gpu"), offload=offload)
    step = zerojax.train_step(lambda params, x: loss(params, x) * params["scale"][0])
    state, run, losses = plan.place(make), step, []
    if how != "step":
        run = step.compile(state, ROWS)
    if how == "loaded":
        run.save(tmp_path / "step.bin")
        run = step.load(tmp_path / "step.bin", state, ROWS)
    wanted = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    for _ in range(3):
        state, metrics = run(state, ROWS)
        losses.append(float(metrics["loss"]))
        assert [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)] == wanted
    assert "pinned_host" in wanted and losses[0] > losses[1] > losses[2]
    assert how != "step" or step._cache_size() == 1
    assert_close(zerojax.gather_params(state)["scale"], np.array([0.97, 1, 1], "f"), 1e-3)


def test_an_option_and_another_jax_are_named(saved, monkeypatch):
    with pytest.raises(ValueError, match="\n  accumulate: 1 there, 2 here\n"):
        zerojax.train_step(loss, accumulate=2).load(saved, placed(), ROWS)
    monkeypatch.setattr(jax, "__version__", "0.99")
    with pytest.raises(ValueError, match=r"\n  the version of JAX: \S+ there, 0.99 here\n"):
        zerojax.train_step(loss).load(saved, placed(), ROWS)


def test_a_program_that_jax_lowers_otherwise_is_refused(tmp_path):
    """Its jaxpr is the same. In the file are the other numbers."""
    file, dropout = tmp_path / "step.bin", jax.random.key(0)
    drawn = lambda params, x: loss(params, x * jax.random.normal(dropout, (32,)))
    zerojax.train_step(drawn).compile(placed(), ROWS).save(file)
    with (
        jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
        pytest.raises(ValueError, match="\n  the program: "),
    ):
        zerojax.train_step(drawn).load(file, placed(), ROWS)


def test_an_optimizer_that_is_passed_is_known_by_what_it_does(tmp_path):
    """In another process it is another object."""

    def step(rate):
        tx, params = optax.sgd(rate), {"w": jnp.ones((32, 64))}
        state = {"params": params, "opt_state": tx.init(params)}
        plan = zerojax.plan(state, stage=3, mesh=make_mesh())
        return zerojax.train_step(loss, plan=plan, tx=tx), plan.place(state)

    (one, state), (same, again), (other, last) = map(step, (0.1, 0.1, 0.2))
    one.compile(state, ROWS).save(file := tmp_path / "step.bin")
    assert_close(same.load(file, again, ROWS)(again, ROWS), one(state, ROWS), 0)
    says = r"something else:\n  the program: .* here \(.*, such as the learning rate, .*\)\nCompile"
    with pytest.raises(ValueError, match=says):
        other.load(file, last, ROWS)


@pytest.mark.parametrize("keep", [0, 5, 20, -100])
def test_damaged_files_are_refused(keep, saved, tmp_path):
    """Of XLA's code, one other byte crashes the process."""
    file, data = tmp_path / "damaged.bin", saved.read_bytes()
    write = r"step.compile\(state, batch\).save\(path\)"
    with pytest.raises(FileNotFoundError, match=rf"no compiled step is at .*damaged.bin.*{write}"):
        zerojax.train_step(loss).load(file, placed(), ROWS)
    for damaged in (data[:keep], data[:keep] + bytes([data[keep] ^ 1]) + data[keep:][1:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"damaged.bin is (not|damaged).*{write}"):
            zerojax.train_step(loss).load(file, placed(), ROWS)


def test_a_step_with_a_callback_cannot_be_saved(tmp_path):
    def prints(params, x):
        jax.debug.print("{}", x[0, 0])
        return loss(params, x)

    compiled = zerojax.train_step(prints).compile(placed(), ROWS)
    with pytest.raises(ValueError, match=r"cannot write this step .*Take callbacks out of the"):
        compiled.save(tmp_path / "step.bin")
    assert not list(tmp_path.iterdir())


def test_a_step_that_has_run_is_loaded_on_an_axis_of_size_1(tmp_path):
    """XLA returns shardings that leave the axis out; the plan's do not."""
    mesh = zerojax.mesh(node=1, gpu=8)
    state = zerojax.shard_train_state(make, stage=3, mesh=mesh, axis=("gpu", "node"))
    step, rows = zerojax.train_step(loss), zerojax.shard_batch(ROWS, like=state)
    state, _ = step(state, rows)
    step.compile(state, rows).save(tmp_path / "step.bin")
    loaded = zerojax.train_step(loss).load(tmp_path / "step.bin", state, rows)
    assert_close(loaded(state, rows)[1]["loss"], loss({"w": np.full((32, 64), 0.99)}, ROWS), 1e-5)


def test_a_step_of_nnx_is_compiled_saved_and_loaded(tmp_path):
    make = lambda: nnx_models.make(lambda rngs: nnx.Linear(32, 64, rngs=rngs), tx=optax.sgd(0.1))
    step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2))
    found = []
    for kind in ("step", "compiled", "loaded"):
        args = *zerojax.nnx.shard(make, stage=3, mesh=make_mesh(), min_shard_size=1), ROWS
        if kind == "compiled":
            step = step.compile(*args)
            step.save(tmp_path / "step.bin")
        elif kind == "loaded":
            step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2))
            step = step.load(tmp_path / "step.bin", *args)
        step(*args)
        found.append((step(*args)["loss"], args[0].kernel.get_value()))
    assert_close(found[1:], [found[0]] * 2, 0)


TRAIN = """
import os, sys, jax, jax.numpy as jnp, numpy as np, optax
jnp.ones(3) + 1  # something has been compiled before
import zerojax
from flax.training.train_state import TrainState
names = []
jax.monitoring.register_event_listener(lambda name, **_: names.append(name.split("/")[-1]))
rate, value = map(float, sys.argv[1:])
tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
make = lambda: TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 64))}, tx=tx)
def loss(params, x):
    for _ in range(30):
        x = jnp.tanh(x @ params["w"] / 64)
    return jnp.mean(x)
state = zerojax.shard_train_state(make, stage=3)
state.opt_state.hyperparams["learning_rate"] *= rate
step = zerojax.train_step(loss)
state, metrics = step(state, np.full((16, 64), value, "f"))
print(names.count("cache_hits"), names.count("cache_misses"), float(metrics["loss"]))
"""


@pytest.mark.ci
def test_a_second_process_compiles_nothing(tmp_path):
    """It learns at another rate from another batch, and reads what the first one has compiled."""
    env = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    env |= {"ZEROJAX_CACHE": f"{tmp_path}/zerojax"}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # some take less than our 0.1
    _, first, said = python(TRAIN, 1e-3, 1, **env)
    _, second, quiet = python(TRAIN, 1e-2, 2, **env)
    hits, misses, value = first.split()
    assert (hits, int(misses) > 0) == ("0", True), first + said
    assert second.split()[0] == misses and second.split()[1] == "0", second + quiet
    assert value != second.split()[2]
    assert f"zerojax: compiled programs are kept in {tmp_path}/zerojax/programs" in said
    assert "compiled programs" not in quiet
