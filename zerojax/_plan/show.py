"""A plan as a picture, as a table, and one of its leaves as text."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zerojax import _figures
from zerojax._figures import Axes, Figure
from zerojax._plan.layout import Layout, LeafPlan
from zerojax._plan.placement import Groups
from zerojax._state.hints import NUMBER
from zerojax._state.state import OPT_STATE, OTHER, PARAMS, paths_like
from zerojax._table import Cell, Table, human_bytes, told_apart
from zerojax._types import Device
from zerojax._wire.codecs import Quantized, Ways, each_of

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

REASON, SIZES = "why not sharded", ("size", "per device")
LEAST_ALIKE = 3  # leaves that share a row of the table
LEAVES, DEVICES = 16, 8  # drawn; a line says how many more there are
LONGEST_PATH = 34  # unless it takes more to tell two apart
Bounds = tuple[int, int]  # along one dimension
Extent = tuple[float, float]  # the same, in parts of its size


# -- as a picture


def plot(plan: Layout, title: str, path: str | None) -> Figure:
    """Draws a row for each leaf, largest first, and a column for each device.

    A box is the leaf; the part that the device has is filled.
    """
    devices = list(plan.mesh.devices.flat)[:DEVICES]
    by_size = sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)
    leaves = by_size[:LEAVES]
    figure, axes = _figures.panels(1.5 + 0.3 * len(leaves))
    for row, leaf in enumerate(leaves):
        for column, part in enumerate(parts(plan, leaf, devices)):
            _draw_box(axes, column, row, part, COLOURS[leaf.kind])
        size = f"{human_bytes(leaf.bytes_per_device(plan.mesh))} of {human_bytes(leaf.nbytes)}"
        axes.text(len(devices) + 0.1, row, size, va="center", fontsize=_figures.SMALL)
    names = told_apart([leaf.path for leaf in leaves], LONGEST_PATH)
    axes.set_yticks(range(len(leaves)), names, fontsize=_figures.SMALL)
    axes.set_xticks([n + 0.46 for n in range(len(devices))], [str(d.id) for d in devices])
    axes.set_xlim(-0.1, len(devices) + 1.9)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(_left_out(by_size[LEAVES:], plan.mesh.devices.size - len(devices)))
    _figures.titled(figure, title, 3, handles=_kinds(plan, leaves))
    return _figures.finished(figure, path)


def parts(plan: Layout, leaf: LeafPlan, devices: Sequence[Device]) -> list[list[Extent]]:
    """Returns, for each device, the extents of its shard along the sharded dimensions."""
    held = _held(plan, leaf)
    dims = [dim for dim, entry in enumerate(leaf.spec) if entry is not None]
    extents = []
    for device in devices:
        bounds = [(held[device][dim], leaf.shape[dim]) for dim in dims]
        extents.append([(start / size, stop / size) for (start, stop), size in bounds])
    return extents


def _held(plan: Layout, leaf: LeafPlan) -> dict[Device, list[Bounds]]:
    """Returns the part of a leaf that each device has, by dimension and without the padding."""
    index = leaf.rest.on_device.sharding(plan.mesh).devices_indices_map(leaf.padded_shape)
    shapes = list(zip(leaf.padded_shape, leaf.shape, strict=True))
    return {
        device: [_clipped(piece, *sizes) for piece, sizes in zip(pieces, shapes, strict=True)]
        for device, pieces in index.items()
    }


def _clipped(piece: slice, padded: int, size: int) -> Bounds:
    start, stop, _ = piece.indices(padded)
    return min(start, size), min(stop, size)


def _draw_box(axes: Axes, column: int, row: int, part: list[Extent], fill: str) -> None:
    """Draws a leaf's outline, and in it the shard of one device; two sharded dimensions at most."""
    from matplotlib.patches import Rectangle

    left, top, width, height = column, row - 0.38, 0.92, 0.76
    (x0, x1), (y0, y1) = (part[::-1] + [(0.0, 1.0)] * 2)[:2]
    shard = (left + x0 * width, top + y0 * height), (x1 - x0) * width, (y1 - y0) * height
    axes.add_patch(Rectangle(*shard, facecolor=fill, linewidth=0))
    axes.add_patch(Rectangle((left, top), width, height, fill=False, color="0.6", linewidth=0.6))


def _left_out(leaves: list[LeafPlan], devices: int) -> str:
    more = [f"{devices} more devices hold as much"] if devices else []
    if leaves:
        more.append(f"{len(leaves)} smaller leaves, {human_bytes(sum(x.nbytes for x in leaves))}")
    return "device" + (f"  (not drawn: {'; '.join(more)})" if more else "")


def _kinds(plan: Layout, drawn: list[LeafPlan]) -> list[object]:
    """Makes the legend's handles: the kinds of state that are drawn, and their bytes."""
    from matplotlib.patches import Patch

    return [
        Patch(color=COLOURS[kind], label=f"{TITLES[kind]}, {human_bytes(nbytes)} per device")
        for kind, nbytes in plan.bytes_per_device().items()
        if any(leaf.kind == kind for leaf in drawn)
    ]


# -- as text


def leaf_text(plan: Layout, path: str) -> str:
    """Describes one leaf: its sharding, and which devices hold which part of it."""
    named = {leaf.path: leaf for leaf in plan.leaves}
    if path not in named:
        raise ValueError(f"no leaf {path!r} in this plan. {paths_like(path, list(named))}")
    leaf = named[path]
    why = f", {'replicated: ' if leaf.dim is None else ''}{leaf.reason}" if leaf.reason else ""
    lines = [
        f"{path}: {leaf.dtype}{shape_text(leaf)}, {human_bytes(leaf.bytes_per_device(plan.mesh))} "
        f"of {human_bytes(leaf.nbytes)} on each device{why}{_axes_text(plan, leaf)}"
        + (f", not over {', '.join(leaf.absent)}: the mesh has no such axis" if leaf.absent else "")
    ]
    holders: dict[str, list[str]] = {}
    held = _held(plan, leaf)
    for device in plan.mesh.devices.flat:
        holders.setdefault(_part_text(held[device], leaf), []).append(str(device.id))
    width = max(map(len, holders))
    for part, ids in holders.items():
        lines.append(f"  {part.ljust(width)}  device{'s' * (len(ids) > 1)} {', '.join(ids)}")
    return "\n".join(lines)


def _axes_text(plan: Layout, leaf: LeafPlan) -> str:
    """Says over which axes a leaf is sharded, where the plan has groups."""
    if not plan.is_grouped or leaf.dim is None:
        return ""
    rest, near, update = (" x ".join(p.axes) for p in (leaf.rest, leaf.near, leaf.update))
    text = f", sharded over {rest}" if rest else ", replicated"
    text += f", kept over {near} in a step" if near != rest else ""
    return text + (f", updated over {update}" if update != rest else "")


def shape_text(leaf: LeafPlan) -> str:
    """Returns '[257, 21]', with the shape that the leaf has between steps where that is padded."""
    padded = f" padded to {list(leaf.padded_shape)}" if leaf.rest.padding else ""
    return f"{list(leaf.shape)}{padded}"


def _part_text(bounds: list[Bounds], leaf: LeafPlan) -> str:
    """Returns a part of a leaf as an index: '[0:33, :]'."""
    ranges = list(zip(bounds, leaf.shape, strict=True))
    if leaf.rest.padding and any(start == stop for start, stop in bounds):
        return "only padding"
    return f"[{', '.join(_range_text(part, size) for part, size in ranges)}]"


def _range_text(bounds: Bounds, size: int) -> str:
    start, stop = bounds
    return ":" if bounds == (0, size) else f"{start}:{stop}"


def plan_title(plan: Layout) -> str:
    over = " x ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.batch_axes)
    kind = plan.mesh.devices.flat[0].device_kind
    return f"ZeRO stage {plan.stage} over {over} ({kind}); {_sharded(plan)}"


def _sharded(plan: Layout) -> str:
    """Says which kinds of arrays are sharded, and over which axes where that is not over all."""
    if plan.is_grouped:
        return groups_text(plan.groups)
    return f"sharded: {', '.join(k for k, on in plan.sharded.items() if on) or 'nothing'}"


def groups_text(groups: Groups) -> str:
    over = {kind: " x ".join(axes) for kind, axes in vars(groups).items() if axes}
    return ", ".join(f"{kind} over {axes}" for kind, axes in over.items())


def plan_table(plan: Layout) -> Table:
    """Makes a row for each leaf, or for leaves of layers that are planned alike; only plans that
    pad some, have some in host memory, send some as codes or have annotations over other axes have
    columns for that."""
    pads, tail = _rests_padded(plan), _notes(plan)
    before = "leaf", "shape", *("padded to",) * pads, "spec"
    rows = [_row(plan, *same, pads, tail) for same in _alike(plan)]
    blank, after = [""] * (len(before) - 1), [""] * (1 + len(tail))
    return Table(
        (*before, *SIZES, REASON, *tail),
        rows,
        [plan_title(plan)],
        totals=[(name, *blank, *sizes, *after) for name, *sizes in _totals(plan)],
        formats=dict.fromkeys(SIZES, human_bytes),
        flexible=("leaf", REASON, *tail),
    )


def _row(
    plan: Layout,
    path: str,
    why: str,
    leaves: list[LeafPlan],
    pads: bool,
    notes: Mapping[str, Callable[[LeafPlan], str]],
) -> list[Cell]:
    leaf, count = leaves[0], len(leaves)
    shape, spec = f"{leaf.dtype}{list(leaf.shape)}", ", ".join(str(e or "·") for e in leaf.spec)
    padded = [str(list(leaf.padded_shape)) if leaf.rest.padding else ""] * pads
    sizes = [count * each for each in (leaf.nbytes, leaf.bytes_per_device(plan.mesh))]
    shape = f"{count} x {shape}" if count > 1 else shape
    return [
        path,
        shape,
        *padded,
        f"({spec})",
        *sizes,
        why,
        *(note(leaf) for note in notes.values()),
    ]


def _notes(plan: Layout) -> dict[str, Callable[[LeafPlan], str]]:
    """Returns the last columns, which few plans have."""
    columns: dict[str, tuple[bool, Callable[[LeafPlan], str]]] = {
        "memory": (any(leaf.memory for leaf in plan.leaves), lambda leaf: leaf.memory or ""),
        "sent as": (bool(_codecs(plan)), lambda leaf: _sent_as(plan, leaf)),
        "not in the mesh": (bool(plan.absent), lambda leaf: ", ".join(leaf.absent)),
    }
    return {title: note for title, (is_there, note) in columns.items() if is_there}


class _Alike(NamedTuple):
    """Leaves that share a row of the table: those of layers that are planned alike."""

    path: str  # such as params/layers_{0..31}/up/kernel
    reason: str
    leaves: list[LeafPlan]

    def named(self, number: re.Match[str], text: str) -> tuple[str, str]:
        """Returns the path and the reason with other text for a number of the path."""
        before, after = self.path[: number.start()], self.path[number.end() :]
        name = before.rpartition("/")[2]
        there = rf"(?<=/){re.escape(name + number[0])}(?=[/,]|$)"  # the reason may name a parameter
        return f"{before}{text}{after}", re.sub(there, lambda _: name + text, self.reason)


def _alike(plan: Layout) -> list[_Alike]:
    rows = [_Alike(leaf.path, leaf.reason or "", [leaf]) for leaf in plan.leaves]
    most = max((len(NUMBER.findall(row.path)) for row in rows), default=0)
    for place in reversed(range(most)):  # the innermost loop first
        rows = _joined(plan, rows, place)
    return rows


def _joined(plan: Layout, rows: list[_Alike], place: int) -> list[_Alike]:
    """Joins rows in which nothing differs but one number of the path, as it counts layers."""
    found: dict[tuple, list[tuple[re.Match[str], _Alike]]] = collections.defaultdict(list)
    for row in rows:
        for number in list(NUMBER.finditer(row.path))[place : place + 1]:
            first = row.leaves[0]
            notes = first.absent, _sent_as(plan, first)
            same = dataclasses.replace(first, path="", reason=None), notes
            found[(*row.named(number, "{}"), same, len(row.leaves))].append((number, row))
    joined = {row.path: row for row in rows}
    for numbered in found.values():
        by_number = enumerate(sorted(numbered, key=lambda pair: int(pair[0][0])))
        for _, group in itertools.groupby(by_number, lambda at: int(at[1][0][0]) - at[0]):
            run = [pair for _, pair in group]
            if len(run) >= LEAST_ALIKE:
                (number, first), (last, _) = run[0], run[-1]
                named = first.named(number, f"{{{number[0]}..{last[0]}}}")
                joined[first.path] = _Alike(*named, [leaf for _, row in run for leaf in row.leaves])
                for _, row in run[1:]:
                    del joined[row.path]
    return list(joined.values())


def _codecs(plan: Layout) -> dict[str, Ways]:
    """Returns what weights, and what gradients, are sent as, where some go in blocks of codes."""
    given = plan.precision and {"weight": plan.precision.gather, "gradient": plan.precision.reduce}
    return {
        name: ways
        for name, ways in (given or {}).items()
        if any(isinstance(way, Quantized) for way in each_of(ways))
    }


def _sent_as(plan: Layout, leaf: LeafPlan) -> str:
    """Says what a parameter is sent as: 'weight int8, gradient exactly'."""
    if leaf.kind != PARAMS or leaf.dim is None:
        return ""
    sent = {name: leaf.codec(ways, plan.mesh) for name, ways in _codecs(plan).items()}
    if leaf.rest.dim is None:
        sent.pop("weight", None)  # it rests whole
    names = [f"{name} {codec.dtype or 'exactly'}" for name, codec in sent.items()]
    return ", ".join(names)


def _rests_padded(plan: Layout) -> bool:
    return any(leaf.rest.padding for leaf in plan.leaves)


def _totals(plan: Layout) -> list[tuple[str, int, int]]:
    """Returns the bytes of each kind of state, in all and of each device."""
    now, on_host = plan.bytes_per_device(), plan.host_bytes_per_device()
    full, full_on_host = dict.fromkeys(now, 0), dict.fromkeys(now, 0)
    for leaf in plan.leaves:
        (full_on_host if leaf.is_on_host else full)[leaf.kind] += leaf.nbytes
    sums = [(TITLES[kind], full[kind], now[kind]) for kind in now if full[kind]]
    in_all = "in all on the devices" if plan.offloads else "in all"
    sums.append((in_all, sum(full.values()), sum(now.values())))
    if kept := plan.kept_bytes():
        sums.append(("parameters that a step keeps", full[PARAMS], kept))
    for kind in now:
        if on_host[kind]:
            sums.append((f"{TITLES[kind]} in host memory", full_on_host[kind], on_host[kind]))
    return sums
