"""MaxText's own options for host memory, by the speed of the link, compiled without GPUs.

.venv/maxtext/bin/python benchmarks/offload_maxtext.py --json

The environment is that of `rivals_maxtext.py`. MaxText's: everything as there, and the three
options. Ours: the shardings that say where arrays rest. Unlike its defaults: layers are the first
dimension of parameters (`param_scan_axis=0`), because otherwise it refuses parameters in host
memory. This makes the other rows 6 to 8 ms faster, and 2 GiB smaller. By default MaxText clips
gradients by their norm; without that, its step with the optimizer state in host memory is no
faster.

MaxText 0.2.5 fetches all of the optimizer state with one `device_put` before the update, and all
of the parameters with one before forward (`trainers/pre_train/train.py`). The results' shardings
send them back. XLA starts the fetches at once, because they wait for nothing, and ends them before
forward. So all of that is on the devices through forward and backward.
"""

import figures  # sets how jax starts

# isort: split
import pathlib
from unittest import mock

import offload
import results
import rivals_maxtext
from jax.sharding import NamedSharding

import zerojax

STORED = pathlib.Path(__file__).parent / "offload_maxtext.json"
SETTINGS = {"compile_topology_num_slices": 1, "param_scan_axis": 0}
STATE = {"optimizer_memory_host_offload": "true"}
BOTH = {**STATE, "parameter_memory_host_offload": "true"}
INPUTS = {"remat_policy": "custom", "decoder_layer_input": "offload"}
OPTIONS = {
    "on the devices": {},
    "in host memory": STATE,
    "with parameters in host memory": BOTH,
    "with activations in host memory": {**STATE, **INPUTS},
    "all of it in host memory": {**BOTH, **INPUTS},
}
SCATTER = " + reduce_scatter_combine_threshold_bytes=1"
ROWS = {
    f"7.5B on 8 H100s, MaxText{SCATTER if flags else ''}: {name}": (options, flags)
    for name, options in OPTIONS.items()
    for flags in figures.FLAGS
}


def with_memory_kind(sharding, kind):
    # The devices list no memories, and on their mesh JAX silently drops the kind.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=kind)


def measured(row):
    """Compiles its step and replays it."""
    options, flags = row
    mesh = zerojax.aot.mesh("8xH100")
    compiler = figures.compiler_options(flags, mesh.devices.flat[0])
    with mock.patch.object(NamedSharding, "with_memory_kind", with_memory_kind):
        program = rivals_maxtext.train_step(mesh, compiler, **SETTINGS, **options)
    return offload.replayed(program)


if __name__ == "__main__":
    versions = figures.versions(("maxtext", "flax", "optax"))
    results.main(__doc__, STORED, ROWS, versions, measured)
