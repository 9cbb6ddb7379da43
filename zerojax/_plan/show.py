"""A plan as a picture, as a table, and one of its leaves as text."""

import collections
import itertools
import re
from typing import Any

import jax

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax._kernel.places import KINDS, Groups, LeafPlan
from zerojax._plan.encodings import FEWEST
from zerojax._plan.layout import Layout
from zerojax._plan.precision import is_float
from zerojax._plan.roles import CODED, CORRECTION, SCALES, WIDE, roles_of
from zerojax._state.packed import LEAST_RUN, MOST_RUN, coding_for, codings_of
from zerojax._state.state import OPT_STATE, OTHER, PARAMS, paths_like
from zerojax._table import NUMBER, Cell, Table, human_bytes, shortened
from zerojax._types import Device
from zerojax._wire.codecs import QuantizedWire, codec_of, rules_of

GRADS, ACTIVATIONS = "grads", "activations"

# Each is lighter than the one before, so that they differ in print too.
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
# Columns that most plans leave empty.
RARE = "padded to", "kept as", "memory", "sent as", "not in the mesh", "left to ZeRO"
LEAVES, DEVICES = 16, 8  # at most, in a picture
LONGEST_PATH = 36
Row = dict[str, Any]
Bounds = list[tuple[int, int]]  # of a part of a leaf, by dimension


def _held(plan: Layout, leaf: LeafPlan) -> dict[Device, Bounds]:
    """Returns the part of a leaf that each device has, without the padding."""
    index = leaf.rest.on_device.sharding(plan.mesh).devices_indices_map(leaf.padded_shape)
    return {
        device: [piece.indices(size)[:2] for piece, size in zip(pieces, leaf.shape, strict=True)]
        for device, pieces in index.items()
    }


# -- as a picture


def plot(plan: Layout, path: str | None) -> Figure:
    """Draws a row for each leaf, largest first, and a column for each device.

    A box is the leaf, filled where the device has its shard.
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
    names = shortened([leaf.path for leaf in leaves], LONGEST_PATH)
    axes.set_yticks(range(len(leaves)), names, fontsize=_figures.SMALL)
    axes.set_xticks([n + 0.46 for n in range(len(devices))], [str(d.id) for d in devices])
    axes.set_xlim(-0.1, len(devices) + 1.9)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    left_out = []
    if more := plan.mesh.devices.size - len(devices):
        left_out.append(f"the other {more} devices hold as much")
    if small:
        nbytes = human_bytes(sum(leaf.nbytes for leaf in small))
        left_out.append(f"{len(small)} smaller leaves, {nbytes}")
    axes.set_xlabel("device" + (f"  (not drawn: {'; '.join(left_out)})" if left_out else ""))
    from matplotlib.patches import Patch  # after `panels`, which raises if it is not installed

    kinds = {leaf.kind for leaf in leaves}
    legend = [
        Patch(color=COLOURS[kind], label=f"{TITLES[kind]}, {human_bytes(nbytes)} per device")
        for kind, nbytes in plan.bytes_per_device().items()
        if kind in kinds
    ]
    _figures.titled(figure, plan_title(plan), 3, handles=legend)
    return _figures.finished(figure, path)


def _draw_box(axes: PlotAxes, column: int, row: int, leaf: LeafPlan, held: Bounds) -> None:
    """Draws a leaf's outline, and in it the shard of one device, along two dimensions at most."""
    from matplotlib.patches import Rectangle

    left, top, width, height = column, row - 0.38, 0.92, 0.76
    dims = [dim for dim, entry in enumerate(leaf.spec) if entry is not None]
    parts = [[end / leaf.shape[dim] for end in held[dim]] for dim in dims]
    (x0, x1), (y0, y1) = (parts[::-1] + [[0.0, 1.0]] * 2)[:2]
    shard = (left + x0 * width, top + y0 * height), (x1 - x0) * width, (y1 - y0) * height
    axes.add_patch(Rectangle(*shard, facecolor=COLOURS[leaf.kind], linewidth=0))
    axes.add_patch(Rectangle((left, top), width, height, fill=False, color="0.6", linewidth=0.6))


# -- as text


def leaf_text(plan: Layout, path: str) -> str:
    """Describes one leaf: its sharding, and which devices hold which part of it."""
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    if path not in leaves:
        raise ValueError(f"no leaf {path!r} in this plan. {paths_like(path, list(leaves))}")
    leaf = leaves[path]
    part, full = human_bytes(leaf.bytes_per_device(plan.mesh)), human_bytes(leaf.nbytes)
    text = f"{path}: {leaf.dtype}{shape_text(leaf)}, {part} of {full} on each device"
    if leaf.reason:
        text += f", {'replicated: ' if leaf.dim is leaf.experts is None else ''}{leaf.reason}"
    if plan._is_grouped and leaf.dim is not None:
        rest, near, update = (" x ".join(p.axes) for p in (leaf.rest, leaf.near, leaf.update))
        text += f", sharded over {rest}" if rest else ", replicated"
        text += f", kept over {near} in a step" if near != rest else ""
        text += f", updated over {update}" if update != rest else ""
    kept = dict(zip(leaves, _kept_as(plan), strict=True))[path]
    text += f", kept {'' if kept.startswith('wide') else 'as '}{kept}" if kept else ""
    if leaf.absent:
        text += f", not over {', '.join(leaf.absent)}: the mesh has no such axis"
    if leaf.taken:
        text += f", annotated over {', '.join(leaf.taken)}, which axis= has too: gathered whole"
    holders: dict[str, list[str]] = collections.defaultdict(list)
    held = _held(plan, leaf)
    for device in plan.mesh.devices.flat:
        holders[_part_text(held[device], leaf)].append(str(device.id))
    width = max(map(len, holders))
    for part, ids in holders.items():
        text += f"\n  {part.ljust(width)}  device{'s' * (len(ids) > 1)} {', '.join(ids)}"
    return text


def shape_text(leaf: LeafPlan) -> str:
    """Returns '[257, 21]', or '[257, 21] padded to [264, 21]'."""
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
    """Names the stage, the devices and the kinds of arrays that are sharded."""
    over = " x ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.batch_axes)
    device = plan.mesh.devices.flat[0].device_kind
    sharded = ", ".join(kind for kind in reversed(KINDS) if getattr(plan.groups, kind))
    what = groups_text(plan.groups) if plan._is_grouped else f"sharded: {sharded or 'nothing'}"
    for kind, split in ("sequences", plan.sequence), ("experts", plan.experts):
        what += f"; {kind} over {split.axis}" if split else ""
    return f"ZeRO stage {plan.stage} over {over} ({device}); {what}"


def groups_text(groups: Groups) -> str:
    kinds = [(kind, axes) for kind, axes in vars(groups).items() if axes]
    return ", ".join(f"{kind} over {' x '.join(axes)}" for kind, axes in kinds)


def plan_table(plan: Layout) -> Table:
    """Makes a row for each leaf, or for the leaves of several layers that are planned alike."""
    pairs = zip(plan.leaves, _kept_as(plan), strict=True)
    rows = [_cells(plan, leaf, kept) for leaf, kept in pairs]
    numbers = max(len(NUMBER.findall(leaf.path)) for leaf in plan.leaves)
    for place in reversed(range(numbers)):  # the innermost loop first
        rows = _joined(rows, place)
    for row in rows:
        if row["count"] != 1:
            row["shape"] = f"{row['count']} x {row['shape']}"
    header = [name for name in rows[0] if name not in RARE or any(row[name] for row in rows)]
    header.remove("count")
    totals: list[dict[str, Cell]] = [
        {"leaf": name, "size": full, "per device": part} for name, full, part in _totals(plan)
    ]
    return Table(
        header,
        [list(map(row.__getitem__, header)) for row in rows],
        [plan_title(plan)],
        totals=[[row.get(name, "") for name in header] for row in totals],
        formats=dict.fromkeys(("size", "per device"), human_bytes),
        flexible=("leaf", *header[header.index(REASON) :]),
    )


def _cells(plan: Layout, leaf: LeafPlan, kept: str) -> Row:
    return {
        "leaf": leaf.path,
        "shape": f"{leaf.dtype}{list(leaf.shape)}",
        "padded to": str(list(leaf.padded_shape)) if leaf.rest.padding else "",
        "spec": f"({', '.join(str(entry or '·') for entry in leaf.spec)})",
        "size": leaf.nbytes,
        "per device": leaf.bytes_per_device(plan.mesh),
        REASON: leaf.reason or "",
        "kept as": kept,
        "memory": _memory(plan, leaf),
        "sent as": _sent_as(plan, leaf),
        "not in the mesh": ", ".join(leaf.absent),
        "left to ZeRO": ", ".join(leaf.taken),
        "count": 1,
    }


def _joined(rows: list[Row], place: int) -> list[Row]:
    """Joins rows that differ only in one number of their paths, which counts layers."""
    alike: dict[tuple, list[tuple[int, re.Match[str], Row]]] = collections.defaultdict(list)
    for row in rows:
        for number in list(NUMBER.finditer(row["leaf"]))[place : place + 1]:
            key = tuple(_renumbered(row, number, "{}").values())
            alike[key].append((int(number[0]), number, row))
    joined = {row["leaf"]: row for row in rows}
    for numbered in alike.values():
        numbered.sort(key=lambda each: each[0])
        # The numbers of a run are consecutive: each is as far from its rank.
        for _, run in itertools.groupby(enumerate(numbered), lambda each: each[1][0] - each[0]):
            (_, number, first), *others = [each for _, each in run]
            for _, _, row in others:
                del joined[row["leaf"]]
            if others:
                count = len(others) + 1
                sums = {name: count * first[name] for name in ("size", "per device", "count")}
                path = f"{{{number[0]}..{others[-1][1][0]}}}"
                joined[first["leaf"]] = _renumbered(first, number, path) | sums
    return list(joined.values())


def _renumbered(row: Row, number: re.Match[str], text: str) -> Row:
    """Returns a row with `text` for a number of the path, and where the reason names this layer."""
    before, after = row["leaf"][: number.start()], row["leaf"][number.end() :]
    name = before.rpartition("/")[2]
    layer = rf"(?<=/){re.escape(name + number[0])}(?=[/,:]|$)"
    reason = re.sub(layer, lambda _: name + text, row[REASON])
    return row | {"leaf": f"{before}{text}{after}", REASON: reason}


def _kept_as(plan: Layout) -> list[str]:
    """Says of each leaf what it is, where it has codes, and why a leaf beside them is wide."""
    state = plan._treedef.unflatten(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.leaves)
    codings = codings_of(state)
    kind = next((coding.kind for coding in codings if coding), None)
    triples = zip(plan.leaves, roles_of(state), codings, strict=True)
    return [
        _kept_of_param(leaf, kind, plan._update is None)
        if kind and not coding and leaf.kind == PARAMS
        else _kept_of_state(leaf, role)
        for leaf, role, coding in triples
    ]


def _kept_of_param(leaf: LeafPlan, kind: str, may_be_frozen: bool) -> str:
    """Says why `zerojax.quantize` puts a frozen matrix into no codes of this kind."""
    is_matrix = is_float(leaf) and len(leaf.shape) - leaf.stacked >= 2
    if not is_matrix or not (leaf.frozen or may_be_frozen):
        return ""
    if coding_for(kind, MOST_RUN, leaf.shape, leaf.dtype) is not None:  # where= left it out
        return ""
    return f"wide: no block of {LEAST_RUN} to {MOST_RUN} divides rows of {leaf.shape[-1]}"


def _kept_of_state(leaf: LeafPlan, role: str) -> str:
    """Says what an 8-bit leaf of the optimizer state is, and why a leaf beside them is wide."""
    if role == CODED:
        return "8 bits"
    if role == CORRECTION:
        return "8-bit correction"
    if role != WIDE:
        return "scales of 8 bits" if role == SCALES else ""
    if len(leaf.shape) - leaf.stacked < 2:
        return "wide: a vector"
    return "wide: short rows" if leaf.shape[-1] < FEWEST else "wide: no moment"


def _memory(plan: Layout, leaf: LeafPlan) -> str:
    """Says how a step updates a leaf in host memory, or why it stays on the device."""
    if not leaf.is_on_host:
        return f"device: {leaf.stays}" if leaf.stays else ""
    if leaf.frozen:
        return "host, not updated"
    if plan._update is None:
        return "host, updated as tx= allows: this plan has no tx="
    part = plan._host_parts.get(leaf.path)
    if part is not None and part.length:
        return "host, updated layer by layer"
    return f"host, updated at once{f': {part.why}' if part is not None and part.why else ''}"


def _sent_as(plan: Layout, leaf: LeafPlan) -> str:
    """Says how a parameter is sent, where some are quantized: 'weight int8, gradient exactly'."""
    if plan.precision is None or leaf.kind != PARAMS or leaf.dim is None:
        return ""
    # A parameter that rests whole is not gathered.
    ways = {"weight": plan.precision.gather if leaf.rest.dim is not None else None}
    ways["gradient"] = plan.precision.reduce
    return ", ".join(
        f"{name} {codec_of(leaf, way, plan.mesh).dtype or 'exactly'}"
        for name, way in ways.items()
        if any(isinstance(each, QuantizedWire) for _, each in rules_of(way))
    )


def _totals(plan: Layout) -> list[tuple[str, int, int]]:
    """Returns the bytes of each kind of state, in all and on each device."""

    def sums(held: dict[str, int], on_host: bool, where: str = "") -> list[tuple[str, int, int]]:
        full = collections.Counter[str]()
        for leaf in plan.leaves:
            full[leaf.kind] += leaf.nbytes * (leaf.is_on_host == on_host)
        return [(TITLES[kind] + where, full[kind], held[kind]) for kind in held if full[kind]]

    here = sums(plan.bytes_per_device(), on_host=False)
    in_all = "in all on the devices" if plan._offloads else "in all"
    here.append((in_all, sum(full for _, full, _ in here), sum(part for *_, part in here)))
    if kept := plan._kept_bytes():
        params = sum(leaf.nbytes for leaf in plan.params if not leaf.is_on_host)
        here.append(("parameters that a step keeps", params, kept))
    return here + sums(plan.host_bytes_per_device(), True, " in host memory")
