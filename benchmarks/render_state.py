"""Tables of a state's bytes, of the largest models that they let GPUs train, and of the longest
sequences.

Each function takes the stored rows, and returns a header and rows of cells.
"""

WAYS = {
    "": "fp32",
    "in backward": '`update="backward"`',
    "7 bytes, in backward": "7 bytes a parameter",
}


def _models(rows):
    """Returns cells by GPUs, host memory and way."""
    cells = {}
    for row in rows:
        gpus, host, *way = row["row"].split(", ", 2)
        cells[gpus, host, "".join(way)] = f"{row['billions']}B, {row['step_s']} s"
    return cells


def largest(rows):
    cells = _models(rows)
    names = dict.fromkeys(gpus for gpus, _, _ in cells)
    models = [[name, *(cells.get((name, "0 GB", way), "—") for way in WAYS)] for name in names]
    return ["nothing in host memory", *WAYS.values()], models


def largest_with_host(rows):
    cells = {key: cell for key, cell in _models(rows).items() if key[1] != "0 GB"}
    names, hosts, _ = map(dict.fromkeys, zip(*cells, strict=True))
    models = [[name, *(cells.get((name, host, ""), "—") for host in hosts)] for name in names]
    return ["fp32, memory of the host", *hosts], models


def long_context(rows):
    cells = []
    for row in rows:
        tokens, _, program = row["row"].partition(": ")
        if program in ("zerojax", "annotations"):  # code by hand has the numbers of zerojax
            numbers = (f"{row[name]:.1f}" for name in ("peak_gib", "wire_gib"))
            times = f"{row['step_ms'] / 1e3:.4g}", f"{row['exposed_ms']:.0f}"
            cells.append([f"{program}, {tokens}", *numbers, *times])
    return ["program", "peak, GiB", "sent, GiB", "step, s", "exposed, ms"], cells


def longest(rows):
    cells = []
    for row in rows:
        numbers = (row["device_gib"] + row["workspace_gib"], row["host_gib"], row["step_s"])
        tokens = f"{row['tokens'] / 1e6:.2f}M"
        cells.append([row["row"], tokens, *(f"{number:.0f}" for number in numbers)])
    return ["GPUs", "tokens", "GPU, GiB", "host of 8, GiB", "step, s"], cells


PRECISIONS = {
    "fp32": "fp32",
    "masters": '`param="bfloat16", master="float32"`',
    "split": '`param="bfloat16", master="split"`',
    "codes": 'the same, `moments="int8"`',
}


def state_bytes(rows):
    found = {row["row"]: row for row in rows}

    def cells(name):
        both = [found.get(f"stage 3, {name}{end}") for end in ("", ", in backward")]
        yield f"{both[0]['compiled']:.2f}"
        for key in ("peak_gib", "step_ms"):
            yield ", ".join(str(row[key]) for row in both if row)

    header = ["state", "bytes a parameter", "peak, GiB", "step, ms"]
    return header, [[what, *cells(name)] for name, what in PRECISIONS.items()]
