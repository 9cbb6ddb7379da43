"""The ZeRO paper's Figure 1 and Table 1: from the formula, and from compiled programs."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import zerojax

# Figure 1: 7.5B parameters on 64 devices; stages 0 to 3 in GB.
FIGURE_1 = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}
# Table 1 as printed: parameters -> devices -> GB at stages 1, 2 and 3.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
        256: (518, 263, 8), 1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
        64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip
CELLS = [
    (params, devices, stage, row[stage - 1])
    for params, rows in TABLE_1.items()
    for devices, row in rows.items()
    for stage in (1, 2, 3)
]


def as_printed(gigabytes, printed, params):
    """Whether a number is the paper's: rounded to as many digits as it prints at 7.5B, cut off
    there in the columns of 128B and 1T (4187.5 is printed 4187)."""
    digits = len(str(printed).partition(".")[2])
    if params == 7.5e9:
        return abs(gigabytes - printed) <= 0.5 * 10**-digits + 1e-9
    return printed <= gigabytes + 1e-9 < printed + 10**-digits


def test_there_are_54_cells():
    assert len(CELLS) == 54


def test_the_check_tells_wrong_numbers():
    assert as_printed(4187.5, 4187, 1e12) and not as_printed(4188.0, 4187, 1e12)
    assert as_printed(1.875, 1.88, 7.5e9) and not as_printed(1.87, 1.88, 7.5e9)


@pytest.mark.parametrize(("params", "devices", "stage", "printed"), CELLS)
def test_table_1_by_formula(params, devices, stage, printed):
    table = zerojax.memory_table(params, devices)
    assert as_printed(table.bytes_per_device(params, devices, stage) / 1e9, printed, params)


def test_figure_1_by_formula():
    table = zerojax.memory_table(7.5e9, 64)
    for stage, printed in FIGURE_1.items():
        assert as_printed(table.bytes_per_device(7.5e9, 64, stage) / 1e9, printed, 7.5e9)


COMPILED = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
import zerojax

jax.config.update("jax_num_cpu_devices", 1024)

def argument_bytes(params, count, stage):
    # Parameters in bf16; fp32 copies and both moments are optimizer state; gradients in bf16.
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))
    shape = (1024, int(params) // 1024)
    precision = zerojax.Precision(param="bfloat16", master="float32")

    def make_state():
        tree = {"w": jnp.zeros(shape, jnp.bfloat16)}
        tx = zerojax.master_weights(optax.adam(1e-3), "float32")
        return TrainState.create(apply_fn=None, params=tree, tx=tx)

    plan = zerojax.plan(make_state, stage=stage, mesh=mesh, precision=precision)
    state = plan.abstract()
    shardings = plan.shard_shardings if plan.sharded["grads"] else plan.shardings
    (where,) = (s for s, leaf in zip(shardings, plan.leaves) if leaf.kind == "params")
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)}
    # keep_unused, or the parameters that an update of masters does not read would vanish.
    update = lambda state, grads: plan.scatter(state).apply_gradients(grads=grads)
    stats = jax.jit(update, keep_unused=True).lower(state, grads).compile().memory_analysis()
    counters = sum(leaf.nbytes for leaf in plan.leaves if not leaf.shape)
    return stats.argument_size_in_bytes - counters

cells = json.loads(sys.stdin.read())
print(json.dumps([argument_bytes(*cell) for cell in cells]))
"""


@pytest.fixture(scope="module")
def compiled():
    """Argument bytes of really compiled programs, on up to 1024 emulated devices."""
    cells = [(params, devices, stage) for params, devices, stage, _ in CELLS]
    cells += [(7.5e9, 64, 0)]
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], input=json.dumps(cells), env=env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_table_1_by_compiled_programs(compiled):
    for params, devices, stage, printed in CELLS:
        found = compiled[params, devices, stage]
        # 1024 rows hold a few hundred parameters less than 7.5e9: rounded to 1e-4 GB.
        assert as_printed(round(found / 1e9, 4), printed, params), (params, devices, stage, found)
        formula = zerojax.memory_table(params, devices).bytes_per_device(params, devices, stage)
        assert found == pytest.approx(formula, rel=1e-6)


def test_figure_1_by_compiled_programs(compiled):
    for stage, printed in FIGURE_1.items():
        assert as_printed(compiled[7.5e9, 64, stage] / 1e9, printed, 7.5e9)


# -- any bytes per parameter


def test_other_optimizers():
    plain = zerojax.memory_table(1e9, 8, param_bytes=4, grad_bytes=4, optimizer_bytes=8)
    # all replicated; moments sharded; gradients, too; all sharded
    wanted = {0: 16e9, 1: 8e9 + 8e9 / 8, 2: 4e9 + 12e9 / 8, 3: 16e9 / 8}
    assert {row["stage"]: row["bytes_per_device"] for row in plain.rows} == wanted


def test_rows_and_text():
    table = zerojax.memory_table([7.5e9, 1e12], [4, 64], stages=(1, 3))
    assert len(table.to_dict()) == 8
    assert table.to_dict()[0] == {
        "params": 7.5e9, "devices": 4, "stage": 1, "bytes_per_device": 52.5e9,
    }  # fmt: skip
    header, _, first, *_, last = str(table).splitlines()
    assert header.split("  ")[-2:] == ["stage 1, GB", "stage 3, GB"]
    assert first.split() == ["7.5B", "4", "52.50", "30.00"]
    assert last.split() == ["1000B", "64", "4,187.50", "250.00"]
    assert "<td>31.41</td>" in zerojax.memory_table(7.5e9, 64)._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8), {}, r"params=\[0\] must be positive"),
        ((1e9, 0), {}, r"devices=\[0\] must be positive"),
        ((1e9, []), {}, r"devices=\[\] must be positive"),
        ((1e9, 8), {"stages": (1, 4)}, "stage 4 is none of"),
        ((1e9, 8), {"optimizer_bytes": -1}, "optimizer_bytes=-1 must not be negative"),
    ],
)
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        zerojax.memory_table(*arguments, **options)


def test_a_row_that_is_not_there():
    with pytest.raises(KeyError, match="no row for 2e\\+09 parameters, 8 devices, stage 3"):
        zerojax.memory_table(1e9, 8).bytes_per_device(2e9, 8, 3)


def test_numpy_numbers_make_a_memory_table():
    found = zerojax.memory_table(np.float32(1e9), np.int64(8))
    assert found.to_dict() == zerojax.memory_table(1e9, 8).to_dict()


def test_columns_are_of_the_stages_they_name():
    header, _, row = str(zerojax.memory_table(7.5e9, 64, stages=(3, 1))).splitlines()
    assert header.split("  ")[-2:] == ["stage 3, GB", "stage 1, GB"]
    assert row.split() == ["7.5B", "64", "1.88", "31.41"]
