"""Where parameters are in files of other libraries: other names, layers one by one, other layouts.

`names=` maps the paths of parameters to tensors:

    {
        "embed": "wte.weight",
        "blocks/down": "h.{}.mlp.c_proj.weight",  # {} counts the layers that are stacked here
        "blocks/up": ("h.{}.mlp.c_fc.weight", "out in -> in out"),  # theirs -> ours
        "blocks/q": ("h.{}.attn.qkv.weight", "(0/3 heads dim) in -> in heads dim"),
    }

A layout splits and transposes, so a parameter is a view of its tensor: an import reads the view, an
export writes into it.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax._checkpoint.tensor_files import FileTensor, some
from zerojax._state.packed import Coding, codings_of
from zerojax._state.state import Leaf, named_leaves, path_name
from zerojax._types import PyTree, Shape

Names: TypeAlias = Mapping[str, str | tuple[str, str]]
ReadSlice: TypeAlias = Callable[[tuple[slice, ...]], np.ndarray]
# A parameter in files: its shape and dtype, and a function that reads a slice of it.
Stored: TypeAlias = tuple[jax.ShapeDtypeStruct, ReadSlice]

AXIS = re.compile(r"[A-Za-z_]\w*|1|(\d+)/([1-9]\d*)")  # a name, a dimension of 1, one of parts
GROUP = re.compile(r"\(([^()]+)\)|([^\s()]+)")  # the axes of one dimension
FIELD = re.compile(r"\{(\d*)\}")  # counts what a {} of the path or a dimension of a stack counts
ENTRY = (
    "a tensor is its name, or a pair of its name and a layout: ('h.{}.fc.weight', "
    "'out in -> in out')"
)
HOW = (
    "Name each axis once on each side of ->, as in 'out in -> in out'. On the left you may merge "
    "axes in brackets, as in '(heads dim) in', with a 1, or with one of several parts, as in "
    "'(0/3 out)'; on the right write only names."
)


class FileParam(NamedTuple):
    """A leaf of parameters, and its shape in files. It is a weight there if it has a `coding`."""

    leaf: Leaf
    shape: Shape
    coding: Coding | None = None

    @property
    def value(self) -> PyTree:
        return self.leaf.value

    @property
    def dtype(self) -> np.dtype:
        """The dtype as stored: a numpy array's own, even one that JAX would narrow."""
        if self.coding is not None:
            return self.coding.dtype
        return self.value.dtype if hasattr(self.value, "dtype") else np.asarray(self.value).dtype

    @property
    def in_files(self) -> Leaf:
        if self.coding is None:
            return self.leaf
        sharding = getattr(self.value, "sharding", None)
        struct = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
        return Leaf(self.leaf.path[:-1], struct)

    def reading(self, read: ReadSlice) -> ReadSlice:
        """Returns a function that reads the leaf, from one that reads what files have.

        Each device encodes the rows that it keeps; the host has one layer of a stack at a time.
        """
        if self.coding is None:
            return read
        coding = self.coding

        def rows(index: tuple[slice, ...]) -> np.ndarray:
            *before, last = index
            weight = read((*before, slice(None)))
            if not weight.size:  # a shard of padding only
                return np.zeros((*weight.shape[:-1], coding.row), np.uint8)[..., last]
            return np.asarray(coding.bytes_of(weight))[..., last]

        def by_layer(index: tuple[slice, ...]) -> np.ndarray:
            layers = range(*index[0].indices(self.shape[0]))
            return np.concatenate([rows((slice(n, n + 1), *index[1:])) for n in layers])

        return by_layer if len(self.shape) > 2 and self.shape[0] else rows


def params_of(
    tree: PyTree, shapes: Mapping[str, Shape], is_weight: Callable[[str, str], bool]
) -> dict[str, FileParam]:
    """Returns the parameters by their names in files, of which `shapes` are those without padding.

    `is_weight(codes, weight)` says of what rests as codes whether files have the weight.
    """
    params = {}
    for leaf, coding in zip(named_leaves(tree), codings_of(tree), strict=True):
        name, shape = leaf.name, shapes.get(leaf.name, np.shape(leaf.value))
        if coding is not None and is_weight(name, weight := path_name(leaf.path[:-1])):
            params[weight] = FileParam(leaf, (*shape[:-1], coding.length), coding)
        else:
            params[name] = FileParam(leaf, shape)
    return params


class Source(NamedTuple):
    """The part of a tensor that is a parameter or one of its layers."""

    tensor: str
    leaf: str
    index: tuple[int, ...]  # of the layer
    shape: Shape  # of the parameter, or of this layer
    full: Shape  # of the whole tensor
    part: tuple[int, int]  # which of how many parts of the tensor
    outer: int  # the number of elements before the axis of the parts
    # The shape with one dimension for each axis (None: the tensor is this parameter, unchanged),
    # where the part is on each axis (None: all along it), and which of these axes are ours.
    split: Shape | None = None
    pick: tuple[int | None, ...] = ()
    order: tuple[int, ...] = ()

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Returns this part of a contiguous tensor, without a copy."""
        if self.split is None:
            return tensor
        at = tuple(slice(None) if n is None else n for n in self.pick)
        return tensor.reshape(self.split)[at].transpose(self.order)

    def put(self, tensor: jax.Array | None, value: jax.Array) -> jax.Array:
        """Returns a tensor with `value` as this part, inside `jax.jit`; None is one of zeros."""
        if self.split is None:
            return value
        value = value.transpose(np.argsort(self.order))
        value = jnp.expand_dims(value, [d for d, n in enumerate(self.pick) if n is not None])
        if self.part == (0, 1):
            return value.reshape(self.full)
        tensor = jnp.zeros(self.full, value.dtype) if tensor is None else tensor
        starts = [n or 0 for n in self.pick]
        tensor = lax.dynamic_update_slice(tensor.reshape(self.split), value, starts)
        return tensor.reshape(self.full)


def dotted(name: str) -> str:
    return name.replace("/", ".")


def source(
    tensor: str, leaf: str, index: tuple[int, ...], shape: Shape, text: str | None = None
) -> Source:
    """Reads a layout such as "(heads dim) in -> in heads dim"; None is an unchanged tensor."""
    if text is None:
        return Source(tensor, leaf, index, shape, shape, (0, 1), 1)
    theirs, arrow, right = text.partition("->")
    groups = [(inside or one).split() for inside, one in GROUP.findall(theirs)]
    axes, ours = list(itertools.chain(*groups)), right.split()
    matches = [AXIS.fullmatch(axis) for axis in axes]
    parts = [(int(match[1]), int(match[2])) for match in matches if match and match[1]]
    part, of = parts[0] if parts else (0, 1)
    named = [axis for axis in axes if not axis[0].isdigit()]
    is_right = sorted(named) == sorted(ours) == sorted({*named}) and all(matches) and all(groups)
    has_stray = not arrow or GROUP.sub("", theirs).strip()  # a bracket, say
    if not is_right or has_stray or len(parts) > 1 or part >= of:
        raise ValueError(f"names= has the layout {text!r} for {leaf}. {HOW}")
    if len(ours) != len(shape):
        layer, count = ("a layer is", f", {len(index)} count layers") if index else ("it is", "")
        raise ValueError(
            f"names= gives {leaf} {len(ours)} axes, in {text!r}, but {layer} {list(shape)}{count}. "
            "Name each dimension of a layer."
        )
    sizes = dict(zip(ours, shape, strict=True)) | {"1": 1, f"{part}/{of}": of}
    before = itertools.takewhile(lambda axis: "/" not in axis, axes)
    return Source(
        tensor,
        leaf,
        index,
        shape,
        full=tuple(math.prod(sizes[axis] for axis in group) for group in groups),
        part=(part, of),
        outer=math.prod(sizes[axis] for axis in before),
        split=tuple(sizes[axis] for axis in axes),
        pick=tuple(None if axis in ours else part * ("/" in axis) for axis in axes),
        order=tuple(named.index(axis) for axis in ours),
    )


def sources(
    names: Names, shapes: Mapping[str, Shape], kept: Container[str] = ()
) -> dict[str, list[Source]]:
    """Returns, by the name of each tensor, the parameters of these shapes that it contains.

    The name of a parameter that is not in `names` is its path with dots, unless the parameter is
    `kept` and `names` gives this tensor to another.
    """
    _check_entries(names)
    by_tensor: dict[str, list[Source]] = collections.defaultdict(list)
    taken: dict[str, str] = {}
    for path, entry in names.items():
        pattern = _pattern(path)
        leaves = {leaf: match for leaf in shapes if (match := pattern.fullmatch(leaf))}
        if not leaves:
            raise ValueError(
                f"names= has {path!r}, which is not a parameter. Paths are such as {some(shapes)}."
            )
        for leaf, match in leaves.items():
            if (other := taken.setdefault(leaf, path)) != path:
                raise ValueError(
                    f"names= has {leaf} twice, as {other!r} and as {path!r}. Leave one out."
                )
            for one in _sources_of(leaf, entry, match.groups(), shapes[leaf]):
                by_tensor[one.tensor].append(one)
    others = (leaf for leaf in shapes if leaf not in taken)
    for leaf in [leaf for leaf in others if leaf not in kept or dotted(leaf) not in by_tensor]:
        by_tensor[dotted(leaf)].append(source(dotted(leaf), leaf, (), shapes[leaf]))
    for name, parts in by_tensor.items():
        have, of = sorted(one.part for one in parts), parts[0].part[1]
        alike = len({(one.full, one.outer) for one in parts}) == 1
        if not alike or have != [(part, of) for part in range(of)]:
            raise ValueError(
                f"{name} would consist of {', '.join(dict.fromkeys(one.leaf for one in parts))}, "
                "which do not cover it exactly once. Rename one, or name all parts in names=: "
                "'(0/2 out) in -> in out' and '(1/2 out) in -> in out'."
            )
    return dict(by_tensor)


def has_entry(names: Names, leaf: str) -> bool:
    """Whether `names` has a parameter of this path."""
    _check_entries(names)
    return any(_pattern(path).fullmatch(leaf) for path in names)


def _pattern(path: str) -> re.Pattern:
    return re.compile(re.escape(path).replace(re.escape("{}"), r"(\d+)"))


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
            raise TypeError(f"names= has {path!r}: {entry!r}. Map paths to tensors; {ENTRY}.")
        numbers = {*FIELD.findall(pair[0])}
        are_right = numbers in ({""}, {*map(str, range(len(numbers)))})
        if not are_right or re.search("[{}]", FIELD.sub("", pair[0])):
            raise ValueError(
                f"names= has {path!r}: {entry!r}. Write only {{}} for what is counted, or number "
                f"all from {{0}}; {ENTRY}."
            )


def _sources_of(
    leaf: str, entry: str | tuple[str, str], numbers: tuple[str, ...], shape: Shape
) -> Iterator[Source]:
    name, text = (entry, None) if isinstance(entry, str) else entry
    fields = FIELD.findall(name)
    stacked = len(set(fields) if any(fields) else fields) - len(numbers)
    if numbers and stacked > 0 and "{}" in name:
        raise ValueError(
            f"names= maps {leaf} to {name!r}, where one {{}} belongs to the path and one counts a "
            "first dimension. Number them, the path's first: 'layer.{1}.expert.{0}'."
        )
    if not 0 <= stacked <= len(shape):
        raise ValueError(
            f"names= maps {leaf} to {name!r}: each {{}} there must count what a {{}} of the path "
            f"or a first dimension counts, and {leaf} is {list(shape)}. Write one {{}} for each."
        )
    for index in np.ndindex(*shape[:stacked]):
        yield source(name.format(*numbers, *index), leaf, index, shape[stacked:], text)


def arranged(
    tensors: Mapping[str, FileTensor], wanted: Sequence[Source], shapes: Mapping[str, Shape]
) -> dict[str, Stored]:
    """Returns the wanted parameters that are in the tensors."""
    layers: dict[str, dict[tuple[int, ...], np.ndarray]] = collections.defaultdict(dict)
    for one in wanted:
        if one.tensor in tensors:
            value = tensors[one.tensor].value
            if value.shape != one.full and (one.index or one.split is not None):
                raise ValueError(
                    f"{one.tensor} is {list(value.shape)} in the files, but should be "
                    f"{list(one.full)} by names= and {one.leaf}, which is "
                    f"{list(shapes[one.leaf])}. Pass like= of that size, another layout, or keep= "
                    "to keep your own value."
                )
            layers[one.leaf][one.index] = one.view(value)
    for one in wanted:
        if one.leaf in layers and one.index not in layers[one.leaf]:
            raise ValueError(
                f"{one.tensor} is not in the files, but other layers of {one.leaf} are. Pass a "
                "like= that has as many layers as they have."
            )
    for leaf, parts in layers.items():
        if len(dtypes := sorted({str(part.dtype) for part in parts.values()})) > 1:
            raise ValueError(
                f"the layers of {leaf} are {' and '.join(dtypes)} in the files. Cast them to one "
                "dtype."
            )
    return {leaf: _stored(parts) for leaf, parts in layers.items()}


def _stored(layers: Mapping[tuple[int, ...], np.ndarray]) -> Stored:
    """Returns a parameter whose layers are tensors; it reads only the slices that are asked for."""
    first, counts = layers[min(layers)], [at + 1 for at in max(layers)]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not counts:
            return first[index]
        inner = index[len(counts) :]
        numbers = [range(*one.indices(n)) for one, n in zip(index, counts, strict=False)]
        parts = [layers[at][inner] for at in itertools.product(*numbers)]
        if not parts:  # a device that has only padding
            return np.empty([0] * len(index), first.dtype)
        return np.stack(parts).reshape([*map(len, numbers), *parts[0].shape])

    return jax.ShapeDtypeStruct((*counts, *first.shape), first.dtype), read
