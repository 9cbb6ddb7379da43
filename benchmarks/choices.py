"""Compares the choice of `zerojax forecast --choose` with ways that a person would compile.

python benchmarks/choices.py                     # prints a table
python benchmarks/choices.py --json --only 7.5b  # stores the rows whose name has this in it

The person's list does not come from a bound: stages 3 and 2, the usual groups, weights kept in the
node, quantization, microbatches in both orders, and host memory if nothing fits without. Each way
recomputes as little in backward as fits. The list leaves out ways that need 1.5 times the GPU's
memory by the plan. XLA learns that the network is slow, as from the command line. Programs come
from the command line's cache, so that each is compiled once for all speeds of the network.
"""

import dataclasses
import functools

import figures  # before JAX: it says what JAX may look for
import groups
import results

from zerojax._run import programs as _programs
from zerojax.tools._forecast import (
    cache as _cache,
    choose as _choose,
    network as _network,
    presets as _presets,
)
from zerojax.tools._forecast.forecast import Workload, WorkOptions
from zerojax.tools._forecast.ways import AMSP, HSDP, WayToTrain
from zerojax.tools._hlo import gpus as _gpus

MODELS, COUNTS, CARDS = ("7.5b", "llama-8b", "llama-70b", "170b"), (8, 64, 400), (50, 12.5, 3.125)
ROWS = {
    f"{model} on {count}xH100 at {card:g} GB/s": (model, count, card)
    for model in MODELS
    for count in COUNTS
    for card in (CARDS if count > 8 else CARDS[:1])  # one host has no network
}
STORED = figures.HERE / "choices.json"
HOPELESS = 1.5

ONE_HOST = [{"stage": 2}, {"accumulate": 4, "order": "layers"}]
OVER_HOSTS = [
    {"groups": HSDP},
    {"groups": AMSP},
    {"regather": "gpu"},
    {"gather": "int8"},
    {"gather": "int8", "reduce": "int8"},
    {"gather": "int8", "reduce": "int8", "regather": "gpu"},
]
ON_HOST = [{"offload": ("opt_state",)}, {"offload": ("opt_state", "params")}]


def by_hand(several_hosts, fits):
    """Compiles a list of ways, each of which recomputes as little in backward as fits. Moves state
    to the host if nothing fits without."""

    def any_fits(how):
        return fits(WayToTrain("dots", **how)) or fits(WayToTrain("full", **how))

    hows = [{}, *ONE_HOST, *(OVER_HOSTS if several_hosts else [])]
    found = [fits(WayToTrain("none", accumulate=4)), *map(any_fits, hows)]
    for how in () if any(found) else ON_HOST:
        any_fits(how)


def measured(row):
    _, count, card = row
    return groups.in_process(chosen, row, is_told=count > 8 and card < _network.SLOW)


def chosen(name, count, card):
    """Chooses, then compiles the ways that a person would have tried, and compares."""
    h100 = _gpus.named("H100")
    rates = dataclasses.replace(h100.rates, network=card * 1e9)
    model, gpus = _presets.on(_presets.preset(name), h100), f"{count}xH100"
    batch = figures.ROWS_PER_GPU * count
    options = WorkOptions(rates=rates)
    shared = model.losses(), model.make_state, model.batch(batch), None, gpus, options
    search = _choose.Search(Workload.of(*shared))
    with _cache.kept(_programs.folder()):
        choice = _choose.Choice(gpus, options, search.run(lossy=True))
        found = described(choice.best), described(choice.best_quantized)
        ranked = {one.way: one for one in choice.tried}
        theirs = list(search.compiled)
        by_hand(count > 8, functools.partial(fits, search, ranked))
    every = sorted(search.compiled.items(), key=lambda item: item[1].step_seconds)
    fit = {way: case.step_seconds for way, case in every if case.fits}
    exact, coded = (least(fit, is_exact) for is_exact in (True, False))
    return {
        "chosen": found[0],
        "chosen_quantized": found[1],
        "best": exact,
        "best_quantized": coded,
        "slower": slower(found[0], exact),
        "slower_quantized": slower(
            found[1] or found[0], min(filter(None, (exact, coded)), key=ms, default=None)
        ),
        "compiled": [
            {
                "way": str(way),
                "step_ms": round(1e3 * case.step_seconds, 1),
                "at_least_ms": round(1e3 * ranked[way].estimate, 1),
                "peak_gib": round(case.peak / 2**30, 1),
                "about_gib": round(ranked[way].peak / 2**30, 1),
                "fits": case.fits,
                "by": "choose" if way in theirs else "hand",
            }
            for way, case in every
        ],
    }


def fits(search, ranked, way):
    """Compiles a way, unless it cannot fit, and returns whether it fits."""
    possible = way in ranked and ranked[way].peak < HOPELESS * search.usable
    return possible and search.case(way).fits


def ms(found):
    return found["step_ms"]


def described(one):
    return one and {"way": str(one.way), "step_ms": round(1e3 * one.case.step_seconds, 1)}


def least(fit, is_exact):
    """Returns the fastest way that fits, exact or quantized."""
    found = {way: seconds for way, seconds in fit.items() if way.is_exact == is_exact}
    way = min(found, key=found.get, default=None)
    return way and {"way": str(way), "step_ms": round(1e3 * found[way], 1)}


def slower(found, best):
    """Returns by which share a choice is slower than the best of all."""
    return round(found["step_ms"] / best["step_ms"] - 1, 4) if found and best else None


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
