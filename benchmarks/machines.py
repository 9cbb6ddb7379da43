"""Forecasts for the machines in docs/which_stage.md, by the commands that a user would type.

    python benchmarks/machines.py --json && python benchmarks/render.py

It needs what `make gpu-compile` installs, and takes about ten minutes on two cores.
"""

import json
import pathlib
import shlex
import subprocess
import sys

import figures  # before JAX: it says what JAX may look for
import results

OFFLOADED = "--stages 0 --offload opt_state,params --update backward"
ROWS = {  # whose machine it is: the arguments of `zerojax forecast`
    "one RTX 4090": "1.38b --gpus 1xRTX4090 --stages 0 --rows 4",
    "one RTX 4090, 64 GB of host memory": f"4b --gpus 1xRTX4090 --rows 8 {OFFLOADED}",
    "two T4s, as on Kaggle": "1.38b --gpus 2xT4 --stages 3 --rows 4",
    "eight H100s": "7.5b --gpus 8xH100 --stages 3 --rows 4",
    "400 H100s": "60b --gpus 400xH100 --stages 3 --rows 30",
}
STORED = pathlib.Path(__file__).parent / "machines.json"


def measured(arguments):
    command = [sys.executable, "-m", "zerojax", "forecast", *shlex.split(arguments), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (case,) = json.loads(done.stdout)["cases"]
    return {
        "arguments": arguments,
        "peak_gib": round(case["peak"] / 2**30, 1),
        "usable_gib": round(case["usable"] / 2**30, 1),
        "host_gib": round(case["pinned"] / 2**30, 1),
        "tokens_per_s": round(case["tokens_per_second"]),
    }


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
