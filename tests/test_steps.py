"""What holds for every row of the table of steps."""

import jax
import numpy as np
import pytest

from tests.support import steps
from tests.support.collectives import unordered
from tests.support.reference import assert_close, shardings


@pytest.fixture(params=steps.TABLE, scope="session")
def row(request):
    return steps.row(request.param)


def logical(placed, wanted):
    """An array without its padding, which must be zero."""
    whole = np.array(placed)
    part = whole[tuple(map(slice, wanted.shape))]
    assert np.count_nonzero(whole) == np.count_nonzero(part)
    return part


def test_a_step_gives_what_one_device_gives(row):
    wanted, loss, norm = row.reference
    tolerance = 2e-2 if row.placed.get("precision") else 1e-5
    metrics = jax.device_get(row.result.metrics)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=tolerance)
    assert metrics.keys() >= ({"loss"} if row.is_eval else {"loss", "grad_norm"})
    if not row.is_eval:
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=tolerance)
        leaves, structure = jax.tree.flatten(wanted)
        leaves = map(logical, jax.tree.leaves(row.result.state), leaves)
        assert_close(structure.unflatten(leaves), wanted, tolerance)


def test_a_state_goes_out_where_it_came_in_and_gives_its_memory(row):
    before, state, _ = row.result
    assert shardings(state) == shardings(row.state)
    is_kept = row.is_eval or not row.options.get("donate", True)
    assert {x.is_deleted() for x in jax.tree.leaves(before)} == {not is_kept}
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(row.state))
    assert row.compiled.memory_analysis().alias_size_in_bytes == (0 if is_kept else size)


def test_it_keeps_the_contract_of_its_stage(row):
    report, is_kept = row.report, row.options.get("donate", True)
    assert len(report.findings()) == (not is_kept), report.findings()
    assert report.backend == "cpu" and report.trains != row.is_eval
    assert report.plan._pads == (3 in row.mesh.devices.shape)
    assert report.accumulate == row.options.get("accumulate", 1)


def test_memory_is_the_plans_and_the_compilers_to_the_byte(row):
    report, stats = row.report, row.compiled.memory_analysis()
    memory, on_device = report.memory, row.plan.bytes_per_device()
    on_host = row.plan.host_bytes_per_device()  # CPUs have one memory
    parts = {"params": memory.parameters}
    parts |= {"opt_state": memory.optimizer, "other": memory.other_state}
    # XLA drops what an evaluation does not read.
    kinds = {"params"} if row.is_eval else parts.keys()
    assert parts == {k: (on_device[k] + on_host[k]) * (k in kinds) for k in parts}
    assert memory.state + memory.batch == stats.argument_size_in_bytes
    assert memory.temporary == stats.temp_size_in_bytes
    assert memory.donated == stats.alias_size_in_bytes
    assert report.placement == report.kept == ()
    # CPU programs count a pointer for each output of several beside it.
    count = len(report.module.roots[report.module.entry].arrays)
    outputs = stats.output_size_in_bytes - 8 * count * (count > 1)
    assert outputs == memory.donated + memory.outputs
    assert memory.peak == memory.state + memory.batch + memory.temporary + memory.outputs
    metrics = len(jax.tree.leaves(row.result.metrics))
    if not row.is_eval and memory.donated:
        assert memory.outputs == 4 * metrics  # the loss, the norm


def test_no_collective_may_run_in_the_midst_of_a_loop_of_them(row):
    """Emulated devices would wait for one another forever: `zerojax/_fence.py`. Nobody orders
    what XLA itself sends over a user's own axis in a loop."""
    loops, free = unordered(row.report.module)
    assert (loops == 0) == (row.model in ("mlp", "convnet") or row.plan.size == 1)
    assert free == [] or row.plan.mesh.size > row.plan.size
