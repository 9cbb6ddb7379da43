"""Tables of what real GPUs have measured.

Each function takes the cases of a machine, and returns a header and rows of cells.
"""

MODELS = {"124m": "GPT, 124M", "1.5b": "GPT, 1.5B", "largest": "the largest that trains"}


def beside_optax(cases):
    header = ["bf16", "of plain `jax.jit`", "tokens/s", "MFU", "peak", "forecast"]
    return header, [_beside_optax(name, cases.get(case, {})) for case, name in MODELS.items()]


def _beside_optax(name, case):
    if "step_ms" not in case:
        return [name, *case.get("failed", "").splitlines()[-1:], *[""] * 5][:6]
    mfu = f"{case['mfu']:.1%}" if case["mfu"] else "—"
    size = f"{name} ({case['params'] / 1e9:.2f}e9 parameters)"
    return [size, f"{case['to_by_hand']:.3f}", f"{case['tokens_per_s']:,}", mfu, *_peaks(case)]


def ways(cases):
    """All GPUs, beside FSDP by annotations."""
    header = ["way", "step", "of annotations", "tokens/s", "forecast", "peak", "forecast"]
    rows = []
    for name, case in cases.items():
        if "to_annotations" in case:
            step, forecast = _steps(case)
            ratio, tokens = f"{case['to_annotations']:.2f}", f"{case['tokens_per_s']:,}"
            rows.append([name, step, ratio, tokens, forecast, *_peaks(case)])
    return header, rows


def with_host(cases):
    """A part of the model in host memory; before the table a sentence about copies."""
    rows = [
        [name.removeprefix("host: "), *_steps(case), f"{case['tokens_per_s']:,}", *_peaks(case)]
        + [f"{case['host_gib']:.2f} GiB"]
        for name, case in cases.items()
        if name.startswith("host: ") and "step_ms" in case
    ]
    header = ["GPT, 1.5B; on the host", "step", "modelled", "tokens/s", "peak", "forecast", "host"]
    rates = cases["copies"]
    told = (
        f"Copies to the device reach {rates['to_device']} GB/s, to the host {rates['to_host']}, "
        f"each of both at once {rates['both_at_once']}; modelled with {rates['modelled']}."
    )
    return told, header, rows


def more(cases):
    """What one GPU trains besides, some of it beside a plain step."""
    rows = [
        [f"{name}, {case['params'] / 1e9:.2f}e9 parameters", *_steps(case)]
        + [f"{case['to_plain']:.2f}" if "to_plain" in case else "—", *_peaks(case)]
        for name, case in cases.items()
        if "host_gib" in case and not name.startswith("host: ")
    ]
    return ["one GPU", "step", "modelled", "of a plain step", "peak", "forecast"], rows


def _steps(case):
    return [f"{ms:.0f} ms" if (ms := case[what]) else "—" for what in ("step_ms", "modelled_ms")]


def _peaks(case):
    peaks = case["peak_gib"], case["forecast_peak_gib"]
    return ["—" if peak is None else f"{peak:.2f} GiB" for peak in peaks]
