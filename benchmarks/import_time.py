"""Times how much `import zerojax` adds to `import jax, flax, optax`, by interleaved processes.

python benchmarks/import_time.py --rounds 15
"""

import argparse
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rounds", type=int, default=15)

PROGRAM = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
WITHOUT, WITH = "jax, flax, optax", "jax, flax, optax, zerojax"


def seconds(modules: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(modules)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    took: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for _ in range(parser.parse_args().rounds):
        for modules, times in took.items():
            times.append(seconds(modules))
    base, more = (statistics.median(times) for times in took.values())
    print(f"{base:.3f} s without, {more:.3f} s with: {more / base - 1:+.1%}")


if __name__ == "__main__":
    main()
