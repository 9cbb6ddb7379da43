"""A plan as a picture, as a table, and one of its leaves as text."""

import collections
import dataclasses
import itertools
import re
from typing import NamedTuple

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax._kernel.places import Groups, LeafPlan
from zerojax._plan.codes import codec_of
from zerojax._plan.layout import Layout
from zerojax._state.hints import NUMBER
from zerojax._state.state import OPT_STATE, OTHER, PARAMS, paths_like
from zerojax._table import Cell, Table, human_bytes, told_apart
from zerojax._types import Device
from zerojax._wire.codecs import Quantized, each_of

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

REASON = "why not sharded"
SIZES = "size", "per device"
RARE = "padded to", "memory", "sent as", "not in the mesh"  # columns
LEAST_ALIKE = 3  # leaves that share a row of the table
LEAVES, DEVICES = 16, 8  # drawn; a line says how many more there are
LONGEST_PATH = 34  # unless it takes more to tell two apart
Bounds = list[tuple[int, int]]  # of a part of a leaf, by dimension


def _held(plan: Layout, leaf: LeafPlan) -> dict[Device, Bounds]:
    """Returns the part of a leaf that each device has, without the padding."""
    index = leaf.rest.on_device.sharding(plan.mesh).devices_indices_map(leaf.padded_shape)
    held = {}
    for device, pieces in index.items():
        sizes = zip(pieces, leaf.padded_shape, leaf.shape, strict=True)
        ends = [(*piece.indices(padded)[:2], size) for piece, padded, size in sizes]
        held[device] = [(min(start, size), min(stop, size)) for start, stop, size in ends]
    return held


# -- as a picture


def plot(plan: Layout, title: str, path: str | None) -> Figure:
    """Draws a row for each leaf, largest first, and a column for each device.

    A box is the leaf; the part that the device has is filled.
    """
    devices = list(plan.mesh.devices.flat)[:DEVICES]
    by_size = sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)
    leaves, small = by_size[:LEAVES], by_size[LEAVES:]
    figure, axes = _figures.panels(1.5 + 0.3 * len(leaves))
    for row, leaf in enumerate(leaves):
        held = _held(plan, leaf)
        for column, device in enumerate(devices):
            _draw_box(axes, column, row, leaf, held[device])
        size = f"{human_bytes(leaf.bytes_per_device(plan.mesh))} of {human_bytes(leaf.nbytes)}"
        axes.text(len(devices) + 0.1, row, size, va="center", fontsize=_figures.SMALL)
    names = told_apart([leaf.path for leaf in leaves], LONGEST_PATH)
    axes.set_yticks(range(len(leaves)), names, fontsize=_figures.SMALL)
    axes.set_xticks([n + 0.46 for n in range(len(devices))], [str(d.id) for d in devices])
    axes.set_xlim(-0.1, len(devices) + 1.9)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    left_out = []
    if more := plan.mesh.devices.size - len(devices):
        left_out.append(f"{more} more devices hold as much")
    if small:
        nbytes = human_bytes(sum(leaf.nbytes for leaf in small))
        left_out.append(f"{len(small)} smaller leaves, {nbytes}")
    axes.set_xlabel("device" + (f"  (not drawn: {'; '.join(left_out)})" if left_out else ""))
    _figures.titled(figure, title, 3, handles=_legend(plan, leaves))
    return _figures.finished(figure, path)


def _draw_box(axes: PlotAxes, column: int, row: int, leaf: LeafPlan, held: Bounds) -> None:
    """Draws a leaf's outline, and in it the shard of one device; two sharded dimensions at most."""
    from matplotlib.patches import Rectangle

    left, top, width, height = column, row - 0.38, 0.92, 0.76
    dims = [dim for dim, entry in enumerate(leaf.spec) if entry is not None]
    parts = [[end / leaf.shape[dim] for end in held[dim]] for dim in dims]
    (x0, x1), (y0, y1) = (parts[::-1] + [[0.0, 1.0]] * 2)[:2]
    shard = (left + x0 * width, top + y0 * height), (x1 - x0) * width, (y1 - y0) * height
    axes.add_patch(Rectangle(*shard, facecolor=COLOURS[leaf.kind], linewidth=0))
    axes.add_patch(Rectangle((left, top), width, height, fill=False, color="0.6", linewidth=0.6))


def _legend(plan: Layout, drawn: list[LeafPlan]) -> list[object]:
    """Makes a handle for each kind of state that is drawn, with its bytes."""
    from matplotlib.patches import Patch

    kinds = {leaf.kind for leaf in drawn}
    return [
        Patch(color=COLOURS[kind], label=f"{TITLES[kind]}, {human_bytes(nbytes)} per device")
        for kind, nbytes in plan.bytes_per_device().items()
        if kind in kinds
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
    holders: dict[str, list[str]] = collections.defaultdict(list)
    held = _held(plan, leaf)
    for device in plan.mesh.devices.flat:
        holders[_part_text(held[device], leaf)].append(str(device.id))
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


def _part_text(held: Bounds, leaf: LeafPlan) -> str:
    """Returns a part of a leaf as an index: '[0:33, :]'."""
    if leaf.rest.padding and any(start == stop for start, stop in held):
        return "only padding"
    parts = zip(held, leaf.shape, strict=True)
    ranges = (":" if ends == (0, size) else "{}:{}".format(*ends) for ends, size in parts)
    return f"[{', '.join(ranges)}]"


def plan_title(plan: Layout) -> str:
    """Says how a plan shards, and which kinds of arrays; with groups, over which axes."""
    over = " x ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.batch_axes)
    kind = plan.mesh.devices.flat[0].device_kind
    sharded = ", ".join(kind for kind, is_sharded in plan.sharded.items() if is_sharded)
    what = groups_text(plan.groups) if plan.is_grouped else f"sharded: {sharded or 'nothing'}"
    return f"ZeRO stage {plan.stage} over {over} ({kind}); {what}"


def groups_text(groups: Groups) -> str:
    over = {kind: " x ".join(axes) for kind, axes in vars(groups).items() if axes}
    return ", ".join(f"{kind} over {axes}" for kind, axes in over.items())


def plan_table(plan: Layout) -> Table:
    """Makes a row for each leaf, or for leaves of layers that are planned alike."""
    rows = [_cells(plan, alike) for alike in _alike(plan)]
    # Few plans pad leaves, keep some in host memory, quantize some or have axes that are absent.
    header = [name for name in rows[0] if name not in RARE or any(row[name] for row in rows)]
    totals: list[dict[str, Cell]] = [
        {"leaf": name, "size": full, "per device": part} for name, full, part in _totals(plan)
    ]
    return Table(
        header,
        [list(map(row.__getitem__, header)) for row in rows],
        [plan_title(plan)],
        totals=[[row.get(name, "") for name in header] for row in totals],
        formats=dict.fromkeys(SIZES, human_bytes),
        flexible=("leaf", *header[header.index(REASON) :]),
    )


def _memory(plan: Layout, leaf: LeafPlan) -> str:
    """Says how a step updates a leaf in host memory, or why it stays on the device."""
    part = plan.host_parts.get(leaf.path)
    if not leaf.is_on_host:
        return f"device: {leaf.stays}" if leaf.stays else ""
    if leaf.frozen:
        return "host, not updated"
    if plan.update is None:
        return "host, updated as tx= allows: the plan was given none"
    if part is not None and part.length:
        return "host, updated layer by layer"
    return f"host, updated at once{f': {part.why}' if part is not None and part.why else ''}"


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


def _cells(plan: Layout, row: _Alike) -> dict[str, Cell]:
    leaf, count = row.leaves[0], len(row.leaves)
    times = f"{count} x " if count > 1 else ""
    return {
        "leaf": row.path,
        "shape": f"{times}{leaf.dtype}{list(leaf.shape)}",
        "padded to": str(list(leaf.padded_shape)) if leaf.rest.padding else "",
        "spec": f"({', '.join(str(entry or '·') for entry in leaf.spec)})",
        "size": count * leaf.nbytes,
        "per device": count * leaf.bytes_per_device(plan.mesh),
        REASON: row.reason,
        "memory": _memory(plan, leaf),
        "sent as": _sent_as(plan, leaf),
        "not in the mesh": ", ".join(leaf.absent),
    }


def _alike(plan: Layout) -> list[_Alike]:
    rows = [_Alike(leaf.path, leaf.reason or "", [leaf]) for leaf in plan.leaves]
    most = max(len(NUMBER.findall(row.path)) for row in rows)
    for place in reversed(range(most)):  # the innermost loop first
        rows = _joined(plan, rows, place)
    return rows


def _joined(plan: Layout, rows: list[_Alike], place: int) -> list[_Alike]:
    """Joins rows in which nothing differs but one number of the path, as it counts layers."""
    same: dict[tuple, list[tuple[int, re.Match[str], _Alike]]] = collections.defaultdict(list)
    for row in rows:
        for number in list(NUMBER.finditer(row.path))[place : place + 1]:
            leaf, count = row.leaves[0], len(row.leaves)
            plans = dataclasses.replace(leaf, path="", reason=None), leaf.absent
            key = *row.named(number, "{}"), *plans, _memory(plan, leaf), _sent_as(plan, leaf), count
            same[key].append((int(number[0]), number, row))
    joined = {row.path: row for row in rows}
    for numbered in same.values():
        numbered.sort(key=lambda at: at[0])
        # In a run of consecutive numbers each is as far from its rank.
        for _, run in itertools.groupby(enumerate(numbered), lambda at: at[1][0] - at[0]):
            (_, number, first), *others = [one for _, one in run]
            if len(others) + 1 >= LEAST_ALIKE:
                named = first.named(number, f"{{{number[0]}..{others[-1][1][0]}}}")
                leaves = [leaf for _, _, row in others for leaf in joined.pop(row.path).leaves]
                joined[first.path] = _Alike(*named, first.leaves + leaves)
    return list(joined.values())


def _sent_as(plan: Layout, leaf: LeafPlan) -> str:
    """Says what a parameter is sent as, where some are quantized: 'weight int8, gradient exactly'.

    What rests whole is not gathered.
    """
    if plan.precision is None or leaf.kind != PARAMS or leaf.dim is None:
        return ""
    ways = {"weight": plan.precision.gather if leaf.rest.dim is not None else None}
    ways["gradient"] = plan.precision.reduce
    return ", ".join(
        f"{name} {codec_of(leaf, way, plan.mesh).dtype or 'exactly'}"
        for name, way in ways.items()
        if any(isinstance(each, Quantized) for each in each_of(way))
    )


def _totals(plan: Layout) -> list[tuple[str, int, int]]:
    """Returns the bytes of each kind of state, in all and of each device."""

    def sums(held: dict[str, int], on_host: bool) -> list[tuple[str, int, int]]:
        full = collections.Counter[str]()
        for leaf in plan.leaves:
            full[leaf.kind] += leaf.nbytes * (leaf.is_on_host == on_host)
        return [(TITLES[kind], full[kind], held[kind]) for kind in held if full[kind]]

    here = sums(plan.bytes_per_device(), on_host=False)
    there = sums(plan.host_bytes_per_device(), on_host=True)
    in_all = "in all on the devices" if plan.offloads else "in all"
    here.append((in_all, sum(full for _, full, _ in here), sum(part for *_, part in here)))
    if kept := plan.kept_bytes():
        params = sum(leaf.nbytes for leaf in plan.params if not leaf.is_on_host)
        here.append(("parameters that a step keeps", params, kept))
    return here + [(f"{title} in host memory", full, part) for title, full, part in there]
