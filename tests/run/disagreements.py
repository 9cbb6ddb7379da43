"""One of two processes that disagree on purpose, case after case; each is to be told in what.

python -m tests.run.disagreements --directory runs/a
"""

import argparse
import json
import os
import pathlib
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.support.schedules import scheduled

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True)
HOST = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
MESSAGES = []


def told(pattern, case, *args, **options):
    """Runs a case, which raises a ValueError of this pattern; with None, it raises nothing."""
    message = "nothing"
    try:
        case(*args, **options)
    except ValueError as error:
        message = str(error)
    MESSAGES.append(message)
    print(f"\ncase {pattern}", flush=True)
    if not re.match(pattern or "nothing$", message, re.DOTALL):
        raise AssertionError(f"{pattern!r} is not what is said:\n{message}")


def made(seed=0, rate=0.01, tx=None):
    params = {"w": jax.random.normal(jax.random.key(seed), (64, 16))}
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(rate))


def placed(*args, stage=3, mesh=None):
    return zerojax.shard_train_state(lambda: made(*args), stage, mesh=mesh)


def rows(count, mesh=None):
    return zerojax.shard_batch(np.ones((count, 64), np.float32), mesh)


def loss(params, batch, noise=None):
    return jnp.mean((batch @ params["w"]) ** 2)


def step(state, batch, *args, loss=loss, **options):
    return zerojax.train_step(loss, donate=False, **scheduled(options))(state, batch, *args)


def two_steps():
    """A second batch of the same shape is not compared, nor is a whole run held up by one."""
    once = zerojax.train_step(loss)
    return once(once(placed(), rows(4))[0], rows(4))


def alone(me):
    """Each process on its own device, at a learning rate of its own."""
    mesh = Mesh(jax.local_devices(), ("data",), axis_types=(AxisType.Auto,))
    return step(placed(me, 0.1 + me, mesh=mesh), rows(2 + 2 * me, mesh))


def last_batch(me, state):
    """Of a last batch of 3 rows, this process has all or none."""
    mine = HOST.T[:3][zerojax.run.process_slice(8)]
    assert len(mine) == (3, 0)[me]
    padded, mask = zerojax.pad_batch({"x": mine}, to=4)

    def masked(params, batch):
        squares = jnp.mean((batch["x"] @ params["w"]) ** 2, -1)
        return zerojax.mean(squares, where=batch["mask"]), jnp.mean(batch["mask"])

    found = zerojax.eval_step(masked)(state, zerojax.shard_batch({**padded, "mask": mask}))
    np.testing.assert_allclose(found["loss"], loss(made().params, HOST.T[:3]), rtol=1e-6)
    assert found["aux"] == 3 / 8


def plans(me, batch):
    told(None, two_steps)
    told(None, alone, me)
    told("placing a state: .*the stage: 2 in process 0, 3 in process 1", placed, stage=2 + me)
    told("placing a state: .*how it is made: .*random_seed 0 .*random_seed 1", placed, me)
    values = "placing a state: .*the values of params/w: float32.64, 16. of checksum"
    told(values, zerojax.shard_train_state, made(me))
    narrow = {"params": {"w": np.arange(4, dtype=jnp.bfloat16)[:: (1, -1)[me]]}}
    values = "placing a state: .*the values of params/w: bfloat16.4. of checksum"
    told(values, zerojax.shard_train_state, narrow)


def steps(me, state, batch):
    rate = "the step: .*the program: optimizer .* -1e-05.* in process 0.* -0.02.* in process 1"
    told(rate, step, placed(0, (1e-5, 0.02)[me]), batch)
    applied = (jnp.sin, jnp.cos)[me]
    tx = optax.stateless(lambda updates, _: jax.tree.map(applied, updates))
    told("the step: .*the program: .* = sin .* = cos ", step, placed(0, 0, tx), batch)
    other = lambda params, batch: loss(params, batch) * (1.0 + me)
    program = r"the program: .* 1\.0 in process 0.* 2\.0 in process 1"
    told(f"the step: .*{program}", step, state, batch, loss=other)
    told(f"eval_step: .*{program}", zerojax.eval_step(other), state, batch)
    tables = [jnp.asarray(HOST), jnp.asarray(HOST + 1)]
    other = lambda params, batch: loss(params, batch @ tables[me] @ tables[0].T)
    constant = "the step: .*the program: constant float32.64, 16. of checksum"
    told(constant, step, state, batch, loss=other)
    accumulate = "the step: .*accumulate: 1 in process 0, 2 in process 1\nStart all with the same"
    told(accumulate, step, state, batch, accumulate=1 + me)
    key = jax.random.key(me)
    told("the step: .*the values of rng: uint32.2. of checksum", step, state, batch, key)
    own = np.full((16, 64), me, np.float32)  # as if each trained for itself
    told("the step: .*values of batch: .* rows of its own, .*shard_batch", step, state, own)


def batches(me, state, batch):
    specs = (P("data"), P(None, "data"))[me]
    split = r"shard_batch: .*how they are split: \(P.*'data'.* in process 0, \(P\(None, .*data"
    told(split, zerojax.shard_batch, np.ones((6, 6), np.float32), batch_specs=specs)
    of_one = r"shard_batch: .*the rows of one process: float32\[8, 64\] in process 0, .*16, 64"
    told(of_one, rows, 8 + 8 * me)
    told(None, last_batch, me, state)
    alone = "the batch has 3 examples in this process.* may have more or fewer. Pass to="
    told(alone, zerojax.pad_batch, np.ones((3, 64)))
    late = "the batch is already on the devices of several.*pass that to zerojax.shard_b"
    told(late, zerojax.pad_batch, batch, to=8)
    with mock.patch.object(jax, "__version__", f"0.{me}.9"):
        version = r"shard_batch: .*the version of JAX: 0\.0\.9 in process 0, 0\.1\.9 in process 1"
        told(version, rows, 6)


def in_loop(directory, method, *args, **options):
    with zerojax.Checkpoints(f"{directory}/loop", keep=None) as checkpoints:
        getattr(checkpoints, method)(*args, **options)


def kept(directory, state):
    zerojax.save(f"{directory}/same", state, step=1)
    zerojax.restore(f"{directory}/same", like=state)
    in_loop(directory, "save", 1, state)
    in_loop(directory, "resume", state)


def unshared(directory, me, state):
    """One path, and another directory behind it in each process."""
    os.makedirs(own := f"{directory}/of_{me}")
    os.chdir(own)
    stale = pathlib.Path(".c.lock")
    if me:
        stale.touch()  # a run that was killed here may have left one
    apart = "/proc/self/cwd/c is not one directory: process 1 does not see the files .* all hosts"
    told(apart, zerojax.save, "/proc/self/cwd/c", state)
    stale.unlink(missing_ok=not me)
    assert not [name for _, _, files in os.walk(own) for name in files]
    shutil.rmtree(own)


def checkpoints(directory, me, state):
    told(None, kept, directory, state)
    place = "zerojax.save: .*the directory: .*/0 in process 0, .*/1 in process 1"
    told(f"{place}\n  step: 0 in", zerojax.save, f"{directory}/{me}", state, step=me)
    place = "zerojax.restore: .*the directory: .*/same in process 0, .*/same1 in process 1\n"
    found = f"{place}  found: True in process 0, False in process 1"
    told(found, zerojax.restore, f"{directory}/same{me or ''}", like=state)
    like = (zerojax.plan(made, stage=3), state)[me]
    cast = "zerojax.restore: .*cast: False in process 0, True in process 1"
    told(cast, zerojax.restore, f"{directory}/same", like=like, cast=me > 0)
    key = jax.random.fold_in(jax.random.key(0), me)
    own = "zerojax.save: .*rng: .* in process 0, .* in process 1.*it saves in data="
    told(own, zerojax.save, f"{directory}/own", state, rng=key)
    own = "Checkpoints.save: .*metadata: .*of 0.* in process 0, .*of 1.* in process 1.*data="
    told(own, in_loop, directory, "save", 2, state, metadata={"run": f"of {me}"})
    path = f"{directory}/{('same', 'loop/1')[me]}"
    read = zerojax.checkpoint.read_extras
    told("zerojax.checkpoint.read_extras: .*the directory", read, path)
    saved = "Checkpoints.save: .*step: 2 in process 0, 3 in process 1"
    told(saved, in_loop, directory, "save", 2 + me, state)
    resumed = "Checkpoints.resume: .*step: 1 in process 0, 2 in process 1"
    told(resumed, in_loop, directory, "resume", state, step=1 + me)
    # Of long texts the end that differs is shown, and of many differences the first.
    much = "Checkpoints: .*every: 1 in.*best: [.]+x+0 in process 0, [.]+x{80}1 in"
    options = {"every": 1 + me, "keep": 1 + me, "mode": ("min", "max")[me]}
    options["best"] = "x" * 1000 + str(me)
    with mock.patch.object(jax, "__version__", f"0.{me}.9"):
        told(f"{much}.*\n  and 1 more\n", zerojax.Checkpoints, f"{directory}/{me}", **options)
    unshared(directory, me, state)


def compiled(me, state, batch):
    other = lambda params, batch: loss(params, batch) * (1.0 + me)
    step = zerojax.train_step(other)
    program = "a compiled step: .*the program: .*1.0.* in process 0.*2.0.* in process 1"
    told(program, step.compile, state, batch)
    same = zerojax.eval_step(loss)
    shapes = "a compiled step: .*the shapes of the batch: float32.8, 64. in .*float32.16, 64. in"
    batches = [rows(count) for count in (4, 8)]  # in both: a new shape is compared
    told(shapes, same.compile, state, batches[me])


def new_values(me, state, batch):
    """A rate that processes put into their states, beside arrays of all."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state = zerojax.shard_train_state(lambda: made(tx=tx), stage=3)
    train = zerojax.train_step(loss, donate=False)
    state, _ = train(state, batch)

    def changed(rate):
        hyper = {"learning_rate": rate}
        return state.replace(opt_state=state.opt_state._replace(hyperparams=hyper))

    told(None, train, changed(jnp.float32(0.2)), batch)
    path = "opt_state/hyperparams/learning_rate"
    values = rf"new values of {path}: .*the values of {path}: 0\.2 in process 0, 0\.4 in process 1"
    for rate in (jnp.float32(0.2 + me / 5), np.float32(0.2 + me / 5)):
        told(values, train, changed(rate), batch)
    step = train.compile(state, batch)
    told(values, step, changed(jnp.float32(0.2 + me / 5)), batch)


def weights(directory, me, state):
    """What leaves as files and comes back."""
    tree = {"params": {"a": HOST, "b": HOST + 1}}
    state, pairs = zerojax.shard_train_state(tree, stage=3), [("a", "x"), ("b", "y")]
    names = dict(pairs if me else pairs[::-1])
    export = zerojax.checkpoint.export_safetensors
    tensors = "zerojax.checkpoint.export.*tensors: .*y .* in process 0, x "
    told(tensors, export, f"{directory}/w", state, names=names)
    place = "zerojax.checkpoint.export.*the directory: .*/w0 in process 0, .*/w1 in process 1"
    told(place, export, f"{directory}/w{me}", state)
    assert not list(pathlib.Path(directory).glob("w*"))
    export(f"{directory}/w", state)
    swap = {"a": "b", "b": "a"} if me else {}
    renamed = "zerojax.checkpoint.import.*tensors: a is a in process 0, [ab] is [ba] in process 1"
    read = zerojax.checkpoint.import_safetensors
    told(renamed, read, f"{directory}/w", state, rename=lambda name: swap.get(name, name))
    named = {"ab"[me]: state["params"]["a"]}
    leaves = "zerojax.gather_params: .*the leaves: a float32.64, 16. in process 0, b float32"
    told(leaves, zerojax.gather_params, named)
    dense = placed(0, 0.1, optax.sgd(0.1))
    plans = [zerojax.plan(one, stage=3) for one in ({"params": state["params"]}, dense)]
    leaves = "zerojax.unpad: .*the leaves: params/a float32.64, 16. in process 0, [a-z/]+"
    told(leaves, zerojax.unpad, ({"params": state["params"]}, dense)[me], plans[me])


def leaving(me, state):
    names = {"w": ("of.first", "of.second")[me]}
    tensors = "zerojax.stream: .*the tensors: .*of.first.* in process 0.*of.second.* in process 1"
    told(tensors, zerojax.stream, state, names=names)
    places = "zerojax.reshard: .*the places: w float32 P.* in process 0, w bfloat16"
    told(places, zerojax.reshard, state, dtype=("float32", "bfloat16")[me])


def main() -> None:
    directory = parser.parse_args().directory
    jax.config.update("jax_num_cpu_devices", 1)
    zerojax.initialize()
    me, state, batch = jax.process_index(), placed(), rows(4)
    plans(me, batch)
    steps(me, state, batch)
    batches(me, state, batch)
    compiled(me, state, batch)
    new_values(me, state, batch)
    leaving(me, state)
    weights(directory, me, state)
    checkpoints(directory, me, state)
    told(None, two_steps)  # after all that
    # Not to the log, whose lines XLA writes into.
    pathlib.Path(f"{directory}.{me}.json").write_text(json.dumps(MESSAGES))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
