"""Where parameters are in files that others wrote: names, layers one by one, other layouts.

`names=` is data, from the paths of parameters to tensors:

    {
        "embed": "wte.weight",
        "blocks/down": "h.{}.mlp.c_proj.weight",  # {} counts the layers that are stacked here
        "blocks/up": ("h.{}.mlp.c_fc.weight", "out in -> in out"),  # theirs -> ours
        "blocks/q": ("h.{}.attn.qkv.weight", "(0/3 heads dim) in -> in heads dim"),
    }

A layout splits and transposes, so that the part of a tensor that a parameter has is a view of it:
to read is to read the view, and to write is to write into it.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from zerojax._checkpoint.tensor_files import FileTensor, some
from zerojax._types import Shape

Names: TypeAlias = Mapping[str, str | tuple[str, str]]

AXIS = re.compile(r"[A-Za-z_]\w*|1|\d+/[1-9]\d*")  # a name, a dimension of 1, a part of several
GROUP = re.compile(r"\(([^()]+)\)|([^\s()]+)")  # the axes of one dimension
FIELD = re.compile(r"\{(\d*)\}")  # what a {} of the path or a dimension of a stack counts
ENTRY = (
    "a tensor is its name, or a pair of its name and a layout: ('h.{}.fc.weight', "
    "'out in -> in out')"
)
HOW = (
    "Name each axis once on each side of ->, as in 'out in -> in out'. Theirs may be merged in "
    "brackets, as in '(heads dim) in', with a 1, or a part of several, as in '(0/3 out)'; ours are "
    "names alone."
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor's axes become those of a parameter, or of one layer of it."""

    theirs: tuple[tuple[str, ...], ...]  # the axes that are merged in each dimension
    ours: tuple[str, ...]

    def part(self) -> tuple[int, int]:
        """Returns which part of the tensor it is, and of how many."""
        part, of = next((axis.split("/") for axis in self._axes() if "/" in axis), ("0", "1"))
        return int(part), int(of)

    def outer(self, shape: Shape) -> int:
        """Returns how many elements the axes have before the one that is split."""
        before = itertools.takewhile(lambda axis: "/" not in axis, self._axes())
        return math.prod(self._sizes(shape, before))

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the whole tensor, by that of what the parameter has of it."""
        return tuple(math.prod(self._sizes(shape, group)) for group in self.theirs)

    def view(self, stored: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns a parameter's part of a contiguous tensor, without a copy."""
        axes = self._axes()
        split = stored.reshape(self._sizes(shape, axes))
        index = (slice(None) if axis in self.ours else _index(axis) for axis in axes)
        picked = split[(*index, ...)]  # a view, of a scalar too
        order = [axis for axis in axes if axis in self.ours]
        return picked.transpose([order.index(axis) for axis in self.ours])

    def _axes(self) -> list[str]:
        return list(itertools.chain(*self.theirs))

    def _sizes(self, shape: Shape, axes: Iterable[str]) -> list[int]:
        ours = dict(zip(self.ours, shape, strict=True))
        return [ours[axis] if axis in ours else int(axis.split("/")[-1]) for axis in axes]


def _index(axis: str) -> int:
    return int(axis.split("/")[0]) if "/" in axis else 0


class Source(NamedTuple):
    """What of a parameter is in a tensor: all of it, a layer, or a layer's part of the tensor."""

    leaf: str
    index: tuple[int, ...]  # the layer
    shape: Shape
    layout: Layout

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the parameter, as it is."""
        return not self.index and self.layout == _as_it_is(len(self.shape))


def whole(leaf: str, shape: Shape) -> Source:
    return Source(leaf, (), shape, _as_it_is(len(shape)))


def sources(names: Names, shapes: Mapping[str, Shape]) -> dict[str, list[Source]]:
    """Returns, by the name of each tensor, what it has of the parameters of these shapes."""
    _check_entries(names)
    found: dict[str, list[Source]] = collections.defaultdict(list)
    taken: dict[str, str] = {}
    for path, entry in names.items():
        pattern = re.compile(re.escape(path).replace(re.escape("{}"), r"(\d+)"))
        leaves = {leaf: match for leaf in shapes if (match := pattern.fullmatch(leaf))}
        if not leaves:
            raise ValueError(
                f"names= has {path!r}, which is no parameter. Name paths as {some(shapes)}."
            )
        for leaf, match in leaves.items():
            if (other := taken.setdefault(leaf, path)) != path:
                raise ValueError(
                    f"names= has {leaf} twice, by {other!r} and by {path!r}. Leave one out."
                )
            for name, source in _sources_of(leaf, entry, match.groups(), shapes[leaf]):
                found[name].append(source)
    for name, parts in found.items():
        _check_parts(name, parts)
    return dict(found)


def _check_entries(names: Names) -> None:
    if not isinstance(names, Mapping):
        raise TypeError(
            f"names= is a {type(names).__name__}. Pass a dict, from the paths of parameters to "
            f"tensors; {ENTRY}."
        )
    for path, entry in names.items():
        pair = (entry, "") if isinstance(entry, str) else entry
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and all(isinstance(text, str) for text in (path, *pair))):
            raise TypeError(f"names= has {path!r} as {entry!r}. Write paths to tensors; {ENTRY}.")
        numbers = FIELD.findall(pair[0])
        are_right = not any(numbers) or {*map(str, range(len({*numbers})))} == {*numbers}
        if not are_right or re.search("[{}]", FIELD.sub("", pair[0])):
            raise ValueError(
                f"names= has {path!r} as {entry!r}. Write {{}} alone for what is counted, or "
                f"number all from {{0}}; {ENTRY}."
            )


def _sources_of(
    leaf: str, entry: str | tuple[str, str], numbers: tuple[str, ...], shape: Shape
) -> Iterable[tuple[str, Source]]:
    name, text = (entry, None) if isinstance(entry, str) else entry
    fields = FIELD.findall(name)
    stacked = len(set(fields) if any(fields) else fields) - len(numbers)
    if numbers and stacked > 0 and "{}" in name:
        raise ValueError(
            f"names= has {leaf} in {name!r}, where one {{}} is of the path and one counts a first "
            "dimension. Number them, the path's first: 'layer.{1}.expert.{0}'."
        )
    if not 0 <= stacked <= len(shape):
        raise ValueError(
            f"names= has {leaf} in {name!r}: each {{}} there counts what a {{}} of the path or a "
            f"first dimension counts, and {leaf} is {list(shape)}. Write as many."
        )
    inner = shape[stacked:]
    layout = _as_it_is(len(inner)) if text is None else parsed(text, leaf)
    if len(layout.ours) != len(inner):
        raise ValueError(
            f"names= gives {leaf} {len(layout.ours)} axes, as {text!r}, and it is {list(shape)}"
            + (f" with {stacked} to count layers. " if stacked else ". ")
            + "Name each dimension of a layer."
        )
    for index in np.ndindex(*shape[:stacked]):
        yield name.format(*numbers, *index), Source(leaf, index, inner, layout)


def parsed(text: str, leaf: str) -> Layout:
    """Returns the layout that a text such as "(heads dim) in -> in heads dim" says."""
    theirs, arrow, ours = text.partition("->")
    groups = [tuple((inside or one).split()) for inside, one in GROUP.findall(theirs)]
    layout = Layout(tuple(groups), tuple(ours.split()))
    axes = list(itertools.chain(*groups))
    named = [axis for axis in axes if not axis[0].isdigit()]
    is_right = arrow and sorted(named) == sorted(layout.ours) == sorted(set(named))
    is_right = is_right and all(AXIS.fullmatch(axis) for axis in axes)
    is_right = is_right and all(groups) and not GROUP.sub("", theirs).strip()  # no stray bracket
    part, of = layout.part() if is_right else (0, 0)
    if not part < of or sum("/" in axis for axis in axes) > 1:
        raise ValueError(f"names= lays {leaf} out as {text!r}. {HOW}")
    return layout


def _as_it_is(ndim: int) -> Layout:
    axes = tuple(f"d{dim}" for dim in range(ndim))
    return Layout(tuple((axis,) for axis in axes), axes)


def _check_parts(name: str, parts: list[Source]) -> None:
    """Raises unless the parameters in a tensor are all of it, each its own part."""
    have = sorted(source.layout.part() for source in parts)
    of = have[0][1]
    shapes = {source.layout.stored_shape(source.shape) for source in parts}
    outer = {source.layout.outer(source.shape) for source in parts}  # of the axis that is split
    is_split = have == [(part, of) for part in range(of)] and len(shapes) == len(outer) == 1
    if not is_split:
        leaves = ", ".join(dict.fromkeys(source.leaf for source in parts))
        raise ValueError(
            f"names= has {leaves} in {name}, which they do not fill, each with a part of its own. "
            "Name one parameter for a tensor, or all parts: '(0/2 out) in -> in out' and "
            "'(1/2 out) in -> in out'."
        )


class Layers:
    """A parameter whose layers are tensors of their own; what is indexed is read."""

    def __init__(self, layers: Mapping[tuple[int, ...], np.ndarray], shape: Shape) -> None:
        self._layers, self.shape = layers, shape
        first = next(iter(layers.values()))
        self.dtype, self._stacked = first.dtype, len(shape) - first.ndim

    def __getitem__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(self.shape)
        counted, inner = index[: self._stacked], index[self._stacked :]
        numbers = [
            range(*one.indices(count)) for one, count in zip(counted, self.shape, strict=False)
        ]
        parts = [self._layers[at][inner] for at in itertools.product(*numbers)]
        if not parts:  # a device that has padding alone
            return np.empty([0] * len(self.shape), self.dtype)
        return np.stack(parts).reshape([*map(len, numbers), *parts[0].shape])


def arranged(
    tensors: Mapping[str, FileTensor],
    found: Mapping[str, list[Source]],
    shapes: Mapping[str, Shape],
    kept: Container[str],
) -> dict[str, np.ndarray | Layers]:
    """Returns tensors as parameters, but those that are kept; those of none keep their names."""
    layers: dict[str, dict[tuple[int, ...], np.ndarray]] = collections.defaultdict(dict)
    for name, parts in found.items():
        for source in parts if name in tensors else ():
            if source.leaf in kept:
                continue
            stored, want = tensors[name].value, source.layout.stored_shape(source.shape)
            if stored.shape != want:
                raise ValueError(
                    f"{name} is {list(stored.shape)} in the files, and names= and "
                    f"{source.leaf}, {list(shapes[source.leaf])}, make it {list(want)}. Give "
                    "like= of that size or another layout, or keep your own with keep=."
                )
            layers[source.leaf][source.index] = source.layout.view(stored, source.shape)
    _check_complete(layers, found)
    rest = {name: one.value for name, one in tensors.items() if name not in found}
    return rest | {leaf: Layers(parts, shapes[leaf]) for leaf, parts in layers.items()}


def first_names(found: Mapping[str, list[Source]]) -> dict[str, str]:
    """Returns, by parameter, its tensor, or the first of its layers."""
    backwards = reversed(list(found.items()))
    return {source.leaf: name for name, sources in backwards for source in sources}


def _check_complete(
    layers: Mapping[str, Mapping[tuple[int, ...], np.ndarray]], found: Mapping[str, list[Source]]
) -> None:
    """Raises for parameters of which the files have some layers, or layers of several dtypes."""
    for name, parts in found.items():
        for leaf, index, *_ in parts:
            have = layers.get(leaf)
            if have is not None and index not in have:
                raise ValueError(
                    f"{name} is not in the files, and other layers of {leaf} are. Give like= as "
                    "many layers as they have."
                )
    for leaf, have in layers.items():
        dtypes = sorted({str(value.dtype) for value in have.values()})
        if len(dtypes) > 1:
            raise ValueError(
                f"the layers of {leaf} are {' and '.join(dtypes)} in the files. Make them one "
                "dtype."
            )
