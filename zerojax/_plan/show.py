"""Who holds what: a plan as a picture, and one leaf of it as text."""

import difflib
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from zerojax._figures import WIDTH, finished, pyplot
from zerojax._plan.layout import Layout, LeafPlan
from zerojax._state.state import OPT_STATE, OTHER, PARAMS
from zerojax._text import html_table, human_bytes, text_table

GRADS, ACTIVATIONS = "grads", "activations"


# Each is lighter than the one before, so that they differ in grey too.
COLOURS = {
    PARAMS: "#14375e",
    GRADS: "#2f78b7",
    OPT_STATE: "#8fc1e3",
    ACTIVATIONS: "#dbe9f4",
    OTHER: "#777777",
}


TITLES = {
    PARAMS: "parameters",
    GRADS: "gradients",
    OPT_STATE: "optimizer state",
    ACTIVATIONS: "in flight (activations and others)",
    OTHER: "other",
}


LEAVES, DEVICES = 16, 8  # drawn; a line says how many more there are
LONGEST_PATH = 34


def plot(plan: Layout, title: str, path: str | None) -> Any:
    """A row a leaf, largest first, and a column a device: each box is the leaf, filled where the
    device holds it."""
    plt = pyplot()
    devices = list(plan.mesh.devices.flat)[:DEVICES]
    by_size = sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)
    leaves = by_size[:LEAVES]
    height = 1.5 + 0.3 * len(leaves)
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    for row, leaf in enumerate(leaves):
        for column, part in enumerate(parts(plan, leaf, devices)):
            draw_box(axes, column, row, part, COLOURS[leaf.kind])
        axes.text(
            len(devices) + 0.1,
            row,
            f"{human_bytes(leaf.bytes_per_device(plan.mesh))} of {human_bytes(leaf.nbytes)}",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(leaves)), [shortened(leaf.path) for leaf in leaves], fontsize=8)
    axes.set_xticks([n + 0.46 for n in range(len(devices))], [str(d.id) for d in devices])
    axes.set_xlim(-0.1, len(devices) + 1.9)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(_left_out(by_size[LEAVES:], plan.mesh.devices.size - len(devices)))
    _legend(figure, plan, leaves)
    figure.suptitle(title, fontsize=10)
    return finished(figure, path)


def draw_box(axes: Any, column: int, row: int, part: list[tuple[float, float]], fill: str) -> None:
    """A leaf as an outline, with the part of it that one device holds: its extent along the
    (at most two) dimensions that are cut."""
    from matplotlib.patches import Rectangle

    left, top, width, height = column, row - 0.38, 0.92, 0.76
    (x0, x1), (y0, y1) = (part[::-1] + [(0.0, 1.0)] * 2)[:2]
    held = (left + x0 * width, top + y0 * height), (x1 - x0) * width, (y1 - y0) * height
    axes.add_patch(Rectangle(*held, facecolor=fill, linewidth=0))
    axes.add_patch(Rectangle((left, top), width, height, fill=False, color="0.6", linewidth=0.6))


def parts(plan: Layout, leaf: LeafPlan, devices: list[Any]) -> list[list[tuple[float, float]]]:
    """For each device: from where to where it holds the leaf, along each dimension that is cut."""
    index = NamedSharding(plan.mesh, leaf.spec).devices_indices_map(leaf.shape)
    cut = [dim for dim, entry in enumerate(leaf.spec) if entry is not None]
    extents = []
    for device in devices:
        bounds = [(index[device][dim].indices(leaf.shape[dim]), leaf.shape[dim]) for dim in cut]
        extents.append([(start / size, stop / size) for (start, stop, _), size in bounds])
    return extents


def leaf_text(plan: Layout, path: str) -> str:
    """One leaf: how it is cut, and which devices hold which part."""
    named = {leaf.path: leaf for leaf in plan.leaves}
    if path not in named:
        close = difflib.get_close_matches(path, named, n=3, cutoff=0.3) or list(named)[:3]
        raise ValueError(f"no leaf {path!r} in this plan. Paths are such as {', '.join(close)}.")
    leaf = named[path]
    why = f", {'whole: ' if leaf.dim is None else ''}{leaf.reason}" if leaf.reason else ""
    lines = [
        f"{path}: {leaf.dtype}{list(leaf.shape)}, {human_bytes(leaf.bytes_per_device(plan.mesh))} "
        f"of {human_bytes(leaf.nbytes)} on each device{why}"
    ]
    holders: dict[str, list[str]] = {}
    index = NamedSharding(plan.mesh, leaf.spec).devices_indices_map(leaf.shape)
    for device in plan.mesh.devices.flat:
        ranges = zip(index[device], leaf.shape, strict=True)
        part = ", ".join(_range_text(piece.indices(size), size) for piece, size in ranges)
        holders.setdefault(f"[{part}]", []).append(str(device.id))
    width = max(map(len, holders))
    for part, ids in holders.items():
        lines.append(f"  {part.ljust(width)}  device{'s' * (len(ids) > 1)} {', '.join(ids)}")
    return "\n".join(lines)


def _range_text(bounds: tuple[int, int, int], size: int) -> str:
    start, stop, _ = bounds
    return ":" if (start, stop) == (0, size) else f"{start}:{stop}"


def shortened(path: str) -> str:
    """Long paths without their middle."""
    if len(path) <= LONGEST_PATH:
        return path
    half = (LONGEST_PATH - 3) // 2
    return f"{path[:half]}...{path[-half:]}"


def _left_out(leaves: list[LeafPlan], devices: int) -> str:
    more = []
    if devices:
        more.append(f"{devices} more devices hold as much")
    if leaves:
        more.append(f"{len(leaves)} smaller leaves, {human_bytes(sum(x.nbytes for x in leaves))}")
    return "device" + (f"  (not drawn: {'; '.join(more)})" if more else "")


def _legend(figure: Any, plan: Layout, drawn: list[LeafPlan]) -> None:
    from matplotlib.patches import Patch

    totals = plan.bytes_per_device()
    handles = [
        Patch(color=COLOURS[kind], label=f"{TITLES[kind]}, {human_bytes(held)} per device")
        for kind, held in totals.items()
        if any(leaf.kind == kind for leaf in drawn)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


HEADER = ("leaf", "shape", "spec", "whole", "per device", "why not sharded")


def plan_rows(plan: Layout) -> list[tuple[str, ...]]:
    return [
        (
            leaf.path,
            f"{leaf.dtype}{list(leaf.shape)}",
            _spec_text(leaf.spec),
            human_bytes(leaf.nbytes),
            human_bytes(leaf.bytes_per_device(plan.mesh)),
            leaf.reason or "",
        )
        for leaf in plan.leaves
    ]


def total_rows(plan: Layout) -> list[tuple[str, ...]]:
    now = plan.bytes_per_device()
    whole = dict.fromkeys(now, 0)
    for leaf in plan.leaves:
        whole[leaf.kind] += leaf.nbytes
    kinds = [k for k in now if whole[k]]
    rows = [(TITLES[k], "", "", human_bytes(whole[k]), human_bytes(now[k]), "") for k in kinds]
    whole_sum, now_sum = sum(whole.values()), sum(now.values())
    return [*rows, ("in all", "", "", human_bytes(whole_sum), human_bytes(now_sum), "")]


def plan_title(plan: Layout) -> str:
    over = " x ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.axes)
    kind = plan.mesh.devices.flat[0].device_kind
    what = [k for k, on in plan.sharded.items() if on]
    shards = ", ".join(what) if what else "nothing"
    return f"ZeRO stage {plan.stage} over {over} ({kind}); sharded: {shards}"


def plan_text(plan: Layout) -> str:
    table = text_table([HEADER, *plan_rows(plan), *total_rows(plan)], frozenset({3, 4}))
    return f"{plan_title(plan)}\n{table}"


def plan_html(plan: Layout) -> str:
    rows = [HEADER, *plan_rows(plan)]
    return html_table([plan_title(plan)], rows, total_rows(plan))


def _spec_text(spec: PartitionSpec) -> str:
    entries = ", ".join("·" if e is None else str(e) for e in spec)
    return f"({entries})"
