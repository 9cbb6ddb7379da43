"""Who holds what: a plan as a picture, and one leaf of it as text."""

import difflib
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding

from zerojax._figures import COLOURS, TITLES, WIDTH, finished, pyplot
from zerojax._text import human_bytes

if TYPE_CHECKING:
    from zerojax._plan.plan import LeafPlan, Plan

LEAVES, DEVICES = 16, 8  # drawn; a line says how many more there are
LONGEST_PATH = 34


def plot(plan: "Plan", title: str, path: str | None) -> Any:
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
            len(devices) + 0.1, row,
            f"{human_bytes(leaf.bytes_per_device(plan.mesh))} of {human_bytes(leaf.nbytes)}",
            va="center", fontsize=8,
        )  # fmt: skip
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


def parts(plan: "Plan", leaf: "LeafPlan", devices: list[Any]) -> list[list[tuple[float, float]]]:
    """For each device: from where to where it holds the leaf, along each dimension that is cut."""
    index = NamedSharding(plan.mesh, leaf.spec).devices_indices_map(leaf.shape)
    cut = [dim for dim, entry in enumerate(leaf.spec) if entry is not None]
    extents = []
    for device in devices:
        bounds = [(index[device][dim].indices(leaf.shape[dim]), leaf.shape[dim]) for dim in cut]
        extents.append([(start / size, stop / size) for (start, stop, _), size in bounds])
    return extents


def leaf_text(plan: "Plan", path: str) -> str:
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


def _left_out(leaves: list["LeafPlan"], devices: int) -> str:
    more = []
    if devices:
        more.append(f"{devices} more devices hold as much")
    if leaves:
        more.append(f"{len(leaves)} smaller leaves, {human_bytes(sum(x.nbytes for x in leaves))}")
    return "device" + (f"  (not drawn: {'; '.join(more)})" if more else "")


def _legend(figure: Any, plan: "Plan", drawn: list["LeafPlan"]) -> None:
    from matplotlib.patches import Patch

    totals = plan.bytes_per_device()
    handles = [
        Patch(color=COLOURS[kind], label=f"{TITLES[kind]}, {human_bytes(held)} per device")
        for kind, held in totals.items()
        if any(leaf.kind == kind for leaf in drawn)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
