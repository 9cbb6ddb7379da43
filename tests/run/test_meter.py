"""What a meter logs, when it reads the devices, and what it shows."""

import gc
import importlib.util
import itertools
import pathlib
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support.clock import stopped

GPU = "NVIDIA H100 80GB HBM3"


class Metric:
    """A loss that notes when it is read."""

    def __init__(self, step, read):
        self.step, self.read = step, read

    def __float__(self):
        self.read.append(self.step)
        return float(self.step)


@pytest.fixture
def clock(monkeypatch):
    return stopped(monkeypatch)


@pytest.fixture
def gpus(monkeypatch):
    """The devices are known by name; returns the FLOP/s of one."""
    monkeypatch.setattr(type(jax.devices()[0]), "device_kind", GPU)
    return zerojax.tools.peak_flops(jax.devices()[:1])


@pytest.fixture
def logged():
    return []


@pytest.fixture
def on_log(logged):
    return lambda *step_and_values: logged.append(step_and_values)


def run(meter, clock):
    """A loop whose steps take 2 seconds; metrics are ready when the devices are asked."""
    for n in meter:
        clock.seconds += 2.0
        meter.update({"loss": jnp.float32(n), "aux": {"right": 0.5, "rows": np.ones(4)}})


def test_floats_of_the_step_and_of_the_time_since_the_last_log(clock, on_log, logged, gpus):
    """A step takes 2 s; of its device's FLOP/s, 3/4 are used."""
    options = {"per_step": {"tokens": 1000, "examples": 10}, "flops": 1.5 * gpus}
    run(zerojax.tools.Meter(25, start=2, on_log=on_log, bar=False, **options), clock)
    assert [step for step, _ in logged] == [3, 10, 20, 25]
    assert logged[0][1].keys() == {"loss", "aux/right", "memory_bytes"}  # the first step compiled
    for step, values in logged[1:]:
        assert values["loss"] == step - 1 and values["aux/right"] == 0.5
        assert values["step_seconds"] == 2.0 and values["mfu"] == 0.75
        assert values["tokens_per_second"] == 500 and values["examples_per_second"] == 5
        assert all(type(value) in (float, int) for value in values.values())


def test_an_interval_with_a_compile_says_so_in_place_of_its_speed(clock, on_log, logged):
    meter = zerojax.tools.Meter(40, on_log=on_log, bar=False, per_step={"tokens": 1000})
    event, seconds = "/jax/core/compile/backend_compile_duration", {12: 9.0, 25: 0.01}
    for n in meter:
        clock.seconds += 2.0
        if n in seconds:  # the first evaluation, and the addition of two numbers
            jax.monitoring.record_event_duration_secs(event, seconds[n])
        meter.update({"loss": np.float32(n)})
    speed = {"step_seconds", "tokens_per_second"}
    shown = {step: values.keys() - {"loss", "memory_bytes"} for step, values in logged}
    assert shown == {1: set(), 10: speed, 20: {"compile_seconds"}, 30: speed, 40: speed}
    assert logged[2][1]["compile_seconds"] == pytest.approx(9.0, abs=0.1)


def test_mfu_is_of_the_devices_of_the_step(clock, on_log, logged, gpus):
    """Half of those of the machine, whose other half may be another run's."""
    everywhere = jax.sharding.NamedSharding(make_mesh(4), jax.sharding.PartitionSpec())
    loss = jax.device_put(np.float32(1), everywhere)
    for _ in (meter := zerojax.tools.Meter(2, every=1, flops=gpus, on_log=on_log, bar=False)):
        clock.seconds += 2.0
        meter.update({"loss": loss})
    assert logged[-1][1]["mfu"] == 1 / 2.0 / 4


def test_a_step_is_read_once_the_next_one_runs(monkeypatch):
    """So that its values are there, or soon are, while the devices have something to do."""
    read, seen = [], []
    monkeypatch.setattr(jax, "device_get", lambda leaves: leaves)
    monkeypatch.setattr(jax.numpy, "ndim", lambda _: 0)
    meter = zerojax.tools.Meter(12, every=5, bar=False)
    for n in meter:
        meter.update({"loss": Metric(n + 1, read)})
        seen.append(list(read))
    assert seen[:2] == [[], [1]] and seen[4:6] == [[1], [1, 5]]
    assert seen[-1] == [1, 5, 10, 12]  # the last: nothing comes after it


def test_a_running_step_is_timed_by_when_it_is_done(clock, monkeypatch, on_log, logged):
    """A loop that takes no time, and steps that take 3 seconds each."""
    monkeypatch.setattr(type(jnp.float32(0)), "is_ready", lambda _: False)
    get = jax.device_get

    def slowly(leaves):
        found = get(leaves)
        clock.seconds = max(clock.seconds, 1000.0 + 3 * float(found[0]))
        return found

    monkeypatch.setattr(jax, "device_get", slowly)
    for n in (meter := zerojax.tools.Meter(15, on_log=on_log, bar=False)):
        meter.update({"loss": jnp.float32(n + 1)})
    assert [values.get("step_seconds") for _, values in logged] == [None, 3.0, 3.0]


def test_times_add_up_where_every_second_step_is_done(clock, monkeypatch, on_log, logged):
    """When it is looked at; each takes 2 seconds of the loop's time."""
    done = itertools.cycle([True, False])
    monkeypatch.setattr(type(jnp.float32(0)), "is_ready", lambda _: next(done))
    for n in (meter := zerojax.tools.Meter(9, every=1, on_log=on_log, bar=False)):
        clock.seconds += 2
        meter.update({"loss": jnp.float32(n + 1)})
    assert [values.get("step_seconds") for _, values in logged] == [None, *[2.0] * 8]


def test_other_processes_read_and_say_nothing(monkeypatch, on_log, logged, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    read = []
    for n in (meter := zerojax.tools.Meter(3, every=1, on_log=on_log)):
        meter.update({"loss": Metric(n, read)})
        meter.log({"validation_loss": 1.0})
    assert meter.done == 3 and not read and not logged
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_units_that_people_read(clock, capsys, gpus):
    run(zerojax.tools.Meter(21, per_step={"tokens": 4000}, flops=1.5 * gpus), clock)
    out, bar = capsys.readouterr()
    assert out == "" and "compiling the step" in bar
    shown = "loss=20, aux/right=0.5, step=2.0 s, tokens/s=2,000, MFU=75.0%, memory="
    assert re.search(rf"21/21 .*{re.escape(shown)}[\d.]+ \w+", bar)


def test_in_a_file_and_without_tqdm_logs_are_lines(clock, monkeypatch, tmp_path, capsys):
    with open(tmp_path / "job.log", "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", file)
        run(zerojax.tools.Meter(21), clock)
        run(zerojax.tools.Meter(21, bar=True), clock)
    assert capsys.readouterr().out.count("of 21") == 4  # steps 1, 10, 20 and 21
    assert (tmp_path / "job.log").read_text().count("21/21") == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for n in (meter := zerojax.tools.Meter(10, per_step={"tokens": 4000})):
        clock.seconds += 2.0
        meter.update({"loss": np.float32(1 / (n + 1))})
        if n == 4:
            meter.log({"validation_loss": jnp.float32(0.25)})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", memory ")[0] for line in lines] == [
        "step 1 of 10: loss 1",
        "step 5: validation loss 0.25",
        "step 10 of 10: loss 0.1, step 2.0 s, tokens/s 2,000",
    ]
    with pytest.raises(ModuleNotFoundError, match=r"Meter\(bar=True\) needs tqdm: pip install"):
        zerojax.tools.Meter(10, bar=True)


def test_own_values_go_above_the_bar_and_to_the_log(on_log, logged, capsys):
    """Also after a loop that breaks, which closes its bar."""
    for n in (meter := zerojax.tools.Meter(9, on_log=on_log)):
        meter.log({"validation_loss": 2.5})
        meter.update({"loss": n})
        if n == 1:
            break
    meter.log({"validation_loss": 2.5})
    out, bar = capsys.readouterr()
    assert out.splitlines() == [f"step {n}: validation loss 2.5" for n in range(3)]
    assert "validation" not in bar and "2/9" in bar
    assert [step for step, _ in logged] == [0, 1, 1, 2] and meter.done == 2
    assert logged[0] == (0, {"validation_loss": 2.5})


@pytest.mark.parametrize("bar", [None, False])
@pytest.mark.parametrize("last, steps", [(4, [1]), (5, [1, 5])])
def test_a_loop_that_ends_early_logs_the_step_that_is_due(on_log, logged, bar, last, steps, capsys):
    """At once, whether it breaks or is preempted; the fourth is not due."""

    def loop(error):
        for n in (meter := zerojax.tools.Meter(9, every=5, on_log=on_log, bar=bar)):
            meter.update({"loss": jnp.float32(n)})
            if n + 1 == last and error:
                raise error
            if n + 1 == last:
                break
        assert bar is False or f"loss={steps[-1] - 1}," in capsys.readouterr().err

    loop(error=None)
    with pytest.raises(zerojax.checkpoint.Preempted):
        loop(zerojax.checkpoint.Preempted(last))
    assert [step for step, _ in logged] == 2 * steps


def test_memory_is_what_a_device_holds(on_log, logged):
    """A shard of what is sharded, and nothing of what is on the host."""
    gc.collect()  # of other tests' arrays
    kept = []
    for n in (meter := zerojax.tools.Meter(4, every=1, on_log=on_log, bar=False)):
        meter.update({"loss": 0.0})  # reads the step before
        if n == 1:
            kept.append(zerojax.shard_batch(np.zeros((64, 1024), np.float32)))
        elif n == 2:
            kept.append(jax.device_put(kept[0], kept[0].sharding.with_memory_kind("pinned_host")))
    before, *after = [values["memory_bytes"] for _, values in logged]
    assert [found - before for found in after] == [64 * 1024 * 4 // 8] * 3


def test_counts_that_cannot_be():
    for counts in ({"steps": -1}, {"steps": 5, "every": 0}):
        with pytest.raises(ValueError, match="steps and start count from 0, every from 1"):
            zerojax.tools.Meter(**counts)


def test_the_writers_of_the_docs_get_what_is_logged(monkeypatch):
    """CLU's and wandb's functions, called by the names that theirs take."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "logging.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, flags=re.M | re.S)
    fakes = {name: mock.MagicMock() for name in ("clu", "wandb")}
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    for block in blocks:
        exec(block, names := {"jax": jax, "zerojax": zerojax})
        names["meter"].log({"loss": 0.5})
    writer = fakes["clu"].metric_writers.create_default_writer.return_value
    writer.write_scalars.assert_called_with(0, {"loss": 0.5})
    fakes["wandb"].log.assert_called_with({"loss": 0.5}, step=0)
