"""Trains on several hosts with Ray's JaxTrainer (alpha in Ray 2.60, `pip install 'ray[train]'`):

    ray job submit --working-dir . -- python examples/multihost_ray.py --hosts 2 --gpus 8 \\
        examples/train_gpt.py --checkpoints /shared/gpt

Each host has one worker, which drives all of its GPUs. Ray joins the processes before the program
starts, so zerojax.initialize() finds them joined. If a worker fails, Ray restarts all of them, and
they resume.
"""

import argparse
import pathlib
import runpy
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--hosts", type=int, required=True)
parser.add_argument("--gpus", type=int, required=True, help="of each host; 0 trains on CPUs")
parser.add_argument("program", nargs=argparse.REMAINDER, help="and its options")


def work(config):
    program, *_ = sys.argv = config["program"]
    sys.path.insert(0, str(pathlib.Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def main():
    args = parser.parse_args()
    JaxTrainer(
        work,
        train_loop_config={"program": args.program},
        jax_config=JaxConfig(use_gpu=True),  # joins the processes, on CPUs too
        scaling_config=ScalingConfig(
            num_workers=args.hosts,
            use_gpu=args.gpus > 0,
            resources_per_worker={"GPU": args.gpus} if args.gpus else {"CPU": 1},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=20),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cuda" if args.gpus else "cpu"}},
        ),
    ).fit()


if __name__ == "__main__":
    main()
