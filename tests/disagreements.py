"""One of two processes that disagree on purpose, case after case; writes what each is told.

python -m tests.disagreements --directory runs/a
"""

import argparse
import json
import os
import pathlib
import shutil
from unittest import mock

import jax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True)


def main() -> None:
    directory = parser.parse_args().directory
    jax.config.update("jax_num_cpu_devices", 1)

    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState
    from jax.sharding import AxisType, Mesh

    import zerojax
    from zerojax._checkpoint import files as _files

    zerojax.initialize()
    me = jax.process_index()

    def made(seed=0, rate=0.01):
        params = {"w": jax.random.normal(jax.random.key(seed), (64, 16))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(rate))

    def loss(params, batch, noise=None):
        return jnp.mean((batch @ params["w"]) ** 2)

    host = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    tables = [jnp.asarray(host), jnp.asarray(host + 1)]
    placed = lambda *args, **more: zerojax.shard_train_state(lambda: made(*args), **more)
    state, batch = placed(), zerojax.shard_batch(np.ones((4, 64), np.float32))

    def step(loss=loss, state=state, batch=batch, *args, **options):
        return zerojax.train_step(loss, donate=False, **options)(state, batch, *args)

    def alone():
        """Each process on its own device, at a learning rate of its own."""
        mesh = Mesh(jax.local_devices(), ("data",), axis_types=(AxisType.Auto,))
        rows = zerojax.shard_batch(np.ones((2 + 2 * me, 64), np.float32), mesh)
        return step(loss, placed(me, 0.1 + me, mesh=mesh), rows)

    def other_version():
        with mock.patch.object(jax, "__version__", f"0.{me}.9"):
            zerojax.shard_batch(np.ones((6, 64), np.float32))

    def two_steps():
        """A second batch of the same shape is not compared, nor is a whole run held up by one."""
        once = zerojax.train_step(loss)
        return once(once(placed(), batch)[0], batch)

    def kept():
        zerojax.save(f"{directory}/same", state, step=1)
        zerojax.restore(f"{directory}/same", like=state)
        with zerojax.Checkpoints(f"{directory}/loop") as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            checkpoints.resume(state)

    def last_batch():
        """Of a last batch of 3 rows, this process has all or none."""
        rows = host.T[:3][zerojax.process_slice(8)]
        assert len(rows) == (3, 0)[me]
        padded, mask = zerojax.pad_batch({"x": rows}, to=4)
        masked = lambda params, batch: (
            zerojax.mean(jnp.mean((batch["x"] @ params["w"]) ** 2, -1), where=batch["mask"]),
            jnp.mean(batch["mask"]),
        )
        found = zerojax.eval_step(masked)(state, zerojax.shard_batch({**padded, "mask": mask}))
        np.testing.assert_allclose(found["loss"], loss(made().params, host.T[:3]), rtol=1e-6)
        assert found["aux"] == 3 / 8

    def unshared(write):
        """One path, and another directory behind it in each process."""
        os.makedirs(own := f"{directory}/of_{me}")
        os.chdir(own)
        try:
            with mock.patch.object(_files, "SEEN_WITHIN", 0.3):
                write("/proc/self/cwd/c")
        finally:
            left = [name for _, _, files in os.walk(own) for name in files]
            shutil.rmtree(own)
            assert not left, left

    def loop(run):
        with zerojax.Checkpoints(f"{directory}/loop") as checkpoints:
            run(checkpoints)

    other_loss = lambda params, batch: loss(params, batch) * (1.0 + me)
    table_loss = lambda params, batch: loss(params, batch @ tables[me] @ tables[0].T)
    plan = zerojax.plan(made, stage=3)
    cases = {
        "agreed": two_steps, "alone": alone, "kept": kept,
        "stage": lambda: placed(stage=2 + me),
        "seed": lambda: placed(me),
        "values": lambda: zerojax.shard_train_state(made(me)),
        "learning rate": lambda: step(state=placed(0, 0.01 * (1 + me))),
        "loss": lambda: step(other_loss),
        "table": lambda: step(table_loss),
        "eval": lambda: zerojax.eval_step(other_loss)(state, batch),
        "rows": lambda: zerojax.shard_batch(np.ones((8 + 8 * me, 64), np.float32)),
        "last batch": last_batch,
        "padded alone": lambda: zerojax.pad_batch(np.ones((3, 64))),
        "padded late": lambda: zerojax.pad_batch(batch, to=8),
        "accumulate": lambda: step(accumulate=1 + me),
        "key": lambda: step(loss, state, batch, jax.random.key(me)),
        "version": other_version,
        "save": lambda: zerojax.save(f"{directory}/{me}", state),
        "step": lambda: zerojax.save(f"{directory}/other", state, step=me),
        "restore": lambda: zerojax.restore(f"{directory}/same{me or ''}", like=state),
        "like": lambda: zerojax.restore(f"{directory}/same", like=(plan, state)[me], cast=me > 0),
        "Checkpoints": lambda: zerojax.Checkpoints(f"{directory}/loop", every=1 + me),
        "Checkpoints.save": lambda: loop(lambda found: found.save(2 + me, state)),
        "resume": lambda: loop(lambda found: found.resume(state, step=1 + me)),
        "unshared": lambda: unshared(lambda path: zerojax.save(path, state)),
        "unshared Checkpoints": lambda: unshared(zerojax.Checkpoints),
        "after all that": two_steps,
    }  # fmt: skip
    told = {}
    for name, case in cases.items():
        try:
            case()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        print(f"\ncase {name}", flush=True)
    # Not to the log, whose lines XLA writes into.
    pathlib.Path(f"{directory}.{me}.json").write_text(json.dumps(told))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
