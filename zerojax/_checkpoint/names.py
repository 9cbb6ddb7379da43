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
import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from zerojax._checkpoint.matching import SavedLeaf
from zerojax._checkpoint.tensor_files import FileTensor, some
from zerojax._types import Shape

Names: TypeAlias = Mapping[str, str | tuple[str, str]]
# A tensor's part as a parameter: what it is, and what reads a slice of it.
Stored: TypeAlias = tuple[SavedLeaf, Callable[[tuple[slice, ...]], np.ndarray]]

AXIS = re.compile(r"[A-Za-z_]\w*|1|(\d+)/([1-9]\d*)")  # a name, a dimension of 1, one of parts
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


class Source(NamedTuple):
    """What a tensor has of a parameter: all of it, a layer, or a layer's part of the tensor."""

    leaf: str
    index: tuple[int, ...]  # the layer
    shape: Shape  # of the parameter, or of this layer
    is_whole: bool  # the tensor is the parameter, as it is
    tensor: Shape  # the shape of the whole tensor
    split: Shape  # and with each axis on its own
    pick: tuple[slice | int, ...]  # what of that is the parameter's
    order: tuple[int, ...]  # in which its axes are here
    part: tuple[int, int]  # which of how many parts it is
    outer: int  # how many elements the axes have before the one that has the parts

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter's part of a contiguous tensor, without a copy."""
        return tensor.reshape(self.split)[(*self.pick, ...)].transpose(self.order)


def source(leaf: str, index: tuple[int, ...], shape: Shape, text: str | None = None) -> Source:
    """Reads a layout such as "(heads dim) in -> in heads dim"; None is a tensor as it is."""
    dims = " ".join(f"d{dim}" for dim in range(len(shape)))
    theirs, arrow, right = (text or f"{dims}->{dims}").partition("->")
    groups = [(inside or one).split() for inside, one in GROUP.findall(theirs)]
    axes, ours = list(itertools.chain(*groups)), right.split()
    matches = [AXIS.fullmatch(axis) for axis in axes]
    parts = [(int(match[1]), int(match[2])) for match in matches if match and match[1]]
    part, of = parts[0] if parts else (0, 1)
    named = [axis for axis in axes if not axis[0].isdigit()]
    is_right = sorted(named) == sorted(ours) == sorted({*named}) and all(matches) and all(groups)
    has_stray = not arrow or GROUP.sub("", theirs).strip()  # a bracket, say
    if not is_right or has_stray or len(parts) > 1 or part >= of:
        raise ValueError(f"names= lays {leaf} out as {text!r}. {HOW}")
    if len(ours) != len(shape):
        of, count = ("a layer of ", f", with {len(index)} to count layers") if index else ("", "")
        raise ValueError(
            f"names= gives {leaf} {len(ours)} axes, as {text!r}, and {of}it is "
            f"{list(shape)}{count}. Name each dimension of a layer."
        )
    sizes = dict(zip(ours, shape, strict=True)) | {"1": 1, f"{part}/{of}": of}
    before = itertools.takewhile(lambda axis: "/" not in axis, axes)
    return Source(
        leaf,
        index,
        shape,
        is_whole=text is None and not index,
        tensor=tuple(math.prod(sizes[axis] for axis in group) for group in groups),
        split=tuple(sizes[axis] for axis in axes),
        pick=tuple(slice(None) if axis in ours else part * ("/" in axis) for axis in axes),
        order=tuple(named.index(axis) for axis in ours),
        part=(part, of),
        outer=math.prod(sizes[axis] for axis in before),
    )


def sources(names: Names, shapes: Mapping[str, Shape]) -> dict[str, list[Source]]:
    """Returns, by the name of each tensor, what it has of the parameters of these shapes."""
    _check_entries(names)
    by_tensor: dict[str, list[Source]] = collections.defaultdict(list)
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
            for name, one in _sources_of(leaf, entry, match.groups(), shapes[leaf]):
                by_tensor[name].append(one)
    for name, parts in by_tensor.items():
        have, of = sorted(one.part for one in parts), parts[0].part[1]
        alike = len({(one.tensor, one.outer) for one in parts}) == 1
        if not alike or have != [(part, of) for part in range(of)]:
            raise ValueError(
                f"names= has {', '.join(dict.fromkeys(one.leaf for one in parts))} in {name}, "
                "which they do not fill, each with a part of its own. Name one parameter for a "
                "tensor, or all parts: '(0/2 out) in -> in out' and '(1/2 out) in -> in out'."
            )
    return dict(by_tensor)


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
        numbers = {*FIELD.findall(pair[0])}
        are_right = numbers in ({""}, {*map(str, range(len(numbers)))})
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
    for index in np.ndindex(*shape[:stacked]):
        yield name.format(*numbers, *index), source(leaf, index, shape[stacked:], text)


def arranged(
    tensors: Mapping[str, FileTensor],
    by_tensor: Mapping[str, list[Source]],
    shapes: Mapping[str, Shape],
    kept: Container[str],
) -> dict[str, Stored]:
    """Returns tensors as parameters, but those that are kept; those of none keep their names."""
    layers: dict[str, dict[tuple[int, ...], np.ndarray]] = collections.defaultdict(dict)
    wanted = [(n, one) for n, parts in by_tensor.items() for one in parts if one.leaf not in kept]
    for name, one in wanted:
        if name in tensors:
            value = tensors[name].value
            if value.shape != one.tensor:
                raise ValueError(
                    f"{name} is {list(value.shape)} in the files, and names= and {one.leaf}, "
                    f"{list(shapes[one.leaf])}, make it {list(one.tensor)}. Give like= of that "
                    "size or another layout, or keep your own with keep=."
                )
            layers[one.leaf][one.index] = one.view(value)
    for name, one in wanted:
        if one.leaf in layers and one.index not in layers[one.leaf]:
            raise ValueError(
                f"{name} is not in the files, and other layers of {one.leaf} are. Give like= as "
                "many layers as they have."
            )
    for leaf, parts in layers.items():
        if len(dtypes := sorted({str(part.dtype) for part in parts.values()})) > 1:
            raise ValueError(
                f"the layers of {leaf} are {' and '.join(dtypes)} in the files. Make them one "
                "dtype."
            )
    rest = {name: {(): one.value} for name, one in tensors.items() if name not in by_tensor}
    return {name: _stored(parts) for name, parts in (rest | layers).items()}


def _stored(layers: Mapping[tuple[int, ...], np.ndarray]) -> Stored:
    """Returns a parameter whose layers are tensors of their own; only what is asked for is read."""
    first, counts = layers[min(layers)], [at + 1 for at in max(layers)]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not counts:
            return first[index]
        inner = index[len(counts) :]
        numbers = [range(*one.indices(n)) for one, n in zip(index, counts, strict=False)]
        parts = [layers[at][inner] for at in itertools.product(*numbers)]
        if not parts:  # a device that has padding alone
            return np.empty([0] * len(index), first.dtype)
        return np.stack(parts).reshape([*map(len, numbers), *parts[0].shape])

    return SavedLeaf((*counts, *first.shape), first.dtype, False), read


def first_names(by_tensor: Mapping[str, list[Source]]) -> dict[str, str]:
    """Returns, by parameter, its tensor, or the first of its layers."""
    backwards = reversed(list(by_tensor.items()))
    return {one.leaf: name for name, parts in backwards for one in parts}
