"""Fewer bytes between nodes, by the speed of their network cards, compiled without GPUs.

python benchmarks/wires.py           # prints the rows
python benchmarks/wires.py --json    # stores them too
python benchmarks/wires.py --check   # compares two rows with the stored ones

The benchmark tells XLA that the network is slow, as `docs/wires.md` advises, unless a row says
otherwise.
"""

import pathlib
import sys

import figures  # before JAX: it says what JAX may look for
import groups
import results

import zerojax
from zerojax.tools._forecast import presets as _presets

CARDS = (*groups.CARDS, 3.125)  # GB/s of each GPU's network card
AXES = ("node", "gpu")
SLOWER = 1.01  # the most that a change may cost
USUAL, HPZ = zerojax.Schedule(), zerojax.Schedule(regather="gpu")
WAYS = {
    "exact": ({}, USUAL),
    "exact, kept in the node": ({}, HPZ),
    "exact, 16 of 36 layers kept": ({}, zerojax.Schedule(keep_layers=16)),
    "weights float8_e4m3fn": ({"gather": "float8_e4m3fn"}, USUAL),
    "weights int8": ({"gather": "int8"}, USUAL),
    "weights int8, kept in the node": ({"gather": "int8"}, HPZ),
    "weights qkv, up int8": ({"gather": {"blocks/(qkv|up)": "int8"}}, USUAL),
    "gradients int8": ({"reduce": "int8"}, USUAL),
    "weights int8, gradients int8": ({"gather": "int8", "reduce": "int8"}, USUAL),
    "weights int8, gradients int8, kept in the node": ({"gather": "int8", "reduce": "int8"}, HPZ),
    "weights int8, gradients int4, kept in the node": ({"gather": "int8", "reduce": "int4"}, HPZ),
}
SOME = "weights qkv, up int8"  # just enough to hide collectives that take longer than compute
TRILLION = ("exact", "weights int8", SOME, "weights int8, gradients int8")
LEAST = "weights int8, gradients int4, kept in the node"
GPT, TRILLION_GPT = ("7.5b", (8, 8), 4), ("1t", (128, 8), 1)
ROWS = {f"7.5b 64xH100 x4: {way}": (*GPT, way, True) for way in WAYS if way != SOME}
ROWS |= {f"7.5b 64xH100 x4, XLA not told: {way}": (*GPT, way, False) for way in ("exact", LEAST)}
# Layers that are gathered in pieces need XLA to know when each piece ends. If XLA takes the network
# for a slow one, the exact step takes 22.2 s.
ROWS |= {f"1t 1024xH100 x1, XLA not told: {way}": (*TRILLION_GPT, way, False) for way in TRILLION}
CHECKED = [f"7.5b 64xH100 x4: {way}" for way in ("exact, kept in the node", LEAST)]
STORED = pathlib.Path(__file__).parent / "wires.json"


def measured(row):
    *row, is_told = row
    return groups.in_process(compiled, row, is_told)


def compiled(name, shape, each, way):
    """Compiles a model's step and replays it for each speed of the network."""
    precision, schedule = WAYS[way]
    model = _presets.preset(name)
    mesh = zerojax.aot.mesh(f"{shape[0] * shape[1]}xH100", shape, AXES)
    precision = zerojax.Precision(compute="bfloat16", **precision)
    plan = zerojax.plan(model.make_state, mesh=mesh, axis=AXES, precision=precision)
    step = zerojax.train_step(model.loss, plan=plan, schedule=schedule)
    batch = zerojax.aot.batch(model.batch(each * plan.size), plan)
    program = step.lower(plan.abstract(), batch).compile()
    return groups.replayed(program, plan._regathering(schedule.regather), 1, CARDS)


def check():
    """Exits with 1 if a step got slower, or sends more, than the stored one."""
    stored, worse = {row["row"]: row for row in results.stored(STORED)["rows"]}, []
    for name in CHECKED:
        now = measured(ROWS[name])
        print(name, now, flush=True)
        limited = [key for key in now if key.startswith("step_ms") or key.endswith("_gib")]
        worse += [
            f"{name}: {key} {stored[name][key]} -> {now[key]}"
            for key in limited
            if now[key] > stored[name][key] * SLOWER
        ]
    if worse:
        sys.exit("\n".join(["worse than stored:", *worse]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        results.main(__doc__, STORED, ROWS, figures.versions(), measured)
