"""Data that is saved with a state: step, rng, the data iterator's state, the user's own metadata.

They are stored as JSON, and reading them never runs code.

[Note: the format]
With them is the number of the format of the whole checkpoint: how leaves are named and encoded, how
padding is left out, what these data are. It grows when a checkpoint is written that an earlier
version of zerojax would read wrongly or not at all, and each version reads all formats up to its
own. A checkpoint without a number is of format 1. `tests/data/` has what releases wrote.
"""

import base64
import dataclasses
import json
import operator
from collections.abc import Mapping
from typing import SupportsIndex, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

import zerojax
from zerojax._checkpoint import files as _files
from zerojax._types import PyTree, is_key

FORMAT = 1  # see the note above
OUR_KEY = "zerojax"  # in Orbax's custom metadata, and the tag of values that JSON does not know
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


@dataclasses.dataclass(frozen=True)
class Extras:
    """The data that was saved with a state; from `read_extras` and `Checkpoints.resume`."""

    step: int | None = None
    rng: PyTree = None
    data: PyTree = None
    metadata: PyTree = None


def encoded(
    step: int | None, rng: object, data: object, metadata: object, metrics: Mapping[str, float]
) -> tuple[dict[str, Json], str]:
    """Returns what all processes save alike, and the text of this one's data."""
    if isinstance(rng, int | float | str | bytes):
        raise TypeError(
            f"rng={rng!r} is not a random key. Pass jax.random.key(n), or a tree of keys; save "
            "anything else as metadata=."
        )
    data = getattr(data, "get_state", lambda: data)()
    try:
        own = json.dumps(encode(data, "data"))
        rest = {"rng": encode(rng, "rng"), "metadata": encode(metadata, "metadata")}
    except RecursionError:
        raise ValueError(
            "rng=, data= or metadata= is nested too deeply, or contains itself. Make it flat."
        ) from None
    rest |= {"step": None if step is None else step_number(step), "metrics": dict(metrics)}
    rest |= {"format": FORMAT, "written_by": zerojax.__version__}
    return rest, own


def pack(shared: dict[str, Json], own: str) -> dict[str, Json]:
    """Returns Orbax's custom metadata, with the data of all processes; each calls it."""
    return {OUR_KEY: {"data": [json.loads(text) for text in _gathered(own)], **shared}}


def custom_in(tree: epath.Path) -> dict[str, PyTree]:
    """Returns Orbax's custom metadata, from its file of the tree."""
    custom = json.loads(_files.read(tree / _files.METADATA)).get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def check_format(tree: epath.Path) -> bool:
    """Raises for a checkpoint of a later format, before any other file of it is looked at.

    Returns whether it must have checksums, because zerojax wrote it. Whatever else is wrong with
    the file that names the format, these tell.
    """
    try:
        saved = custom_in(tree)[OUR_KEY]
        # Without a number, it is older than any.
        number, writer = int(saved.get("format", 1)), str(saved.get("written_by"))
    except (*_files.DAMAGE, OSError):
        return (tree / _files.CHECKSUMS).exists()
    if number > FORMAT:
        raise ValueError(
            f"{tree} is a checkpoint of format {number}, written by zerojax {writer}. This is "
            f"zerojax {zerojax.__version__}, which reads formats up to {FORMAT}. Install zerojax "
            f"{writer} or later."
        )
    return True


def saved_metric(step: epath.Path, name: str) -> float | None:
    """Returns a metric that a step's directory was saved with, by zerojax or an Orbax manager."""
    of_orbax, tree = step / "metrics", _files.tree_in(step)
    if of_orbax.exists():
        metrics = json.loads(_files.read(of_orbax / "metrics"))
    elif tree is not None:
        if wrong := _files.damage(tree, _files.METADATA, check_format(tree)):
            raise ValueError(wrong)
        metrics = custom_in(tree).get(OUR_KEY, {}).get("metrics", {})
    else:
        return None
    value = metrics.get(name)
    return None if value is None else float(value)


def unpack(tree: epath.Path, path: object, *, data: bool = True) -> Extras:
    """Reads Orbax's custom metadata, which holds no extras unless zerojax wrote it."""
    try:
        saved = custom_in(tree).get(OUR_KEY)
        if saved is None:
            return Extras()
        step = None if saved["step"] is None else step_number(saved["step"])
        rng, metadata = decode(saved["rng"]), decode(saved["metadata"])
        parts = [decode(part) for part in saved["data"]] if data else []
    except Exception as error:  # numpy and JAX raise anything for bytes that are not theirs
        raise ValueError(
            f"the step, rng, data or metadata in {path} is damaged ({type(error).__name__}: "
            f"{error}). Restore another checkpoint."
        ) from error
    if len(parts) != jax.process_count() and any(part is not None for part in parts):
        raise ValueError(
            f"{path} has the data iterators of {len(parts)} processes, and this run has "
            f"{jax.process_count()}. Read the rest with data=False, and start the data again "
            "from its step. Save a state that all processes share as metadata=, not data=."
        )
    mine = parts[jax.process_index()] if len(parts) == jax.process_count() else None
    return Extras(step, rng, mine, metadata)


def step_number(step: SupportsIndex) -> int:
    """Returns a step as an int, also from numpy and JAX, as `state.step` is."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        shown = repr(step) if isinstance(step, int | float | str) else f"a {type(step).__name__}"
        raise ValueError(f"step is {shown}, not a count of steps. Pass an integer, 0 or more.")
    return number


def encode(value: object, where: str) -> Json:
    """Returns a value as JSON; tuples, bytes, arrays and PRNG keys become tagged objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {OUR_KEY: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {OUR_KEY: "tuple", "value": items}
    if isinstance(value, dict) and all(isinstance(key, str) and key != OUR_KEY for key in value):
        return {key: encode(item, f"{where}/{key}") for key, item in value.items()}
    if isinstance(value, jax.Array) and is_key(value):
        data = encode(np.asarray(jax.random.key_data(value)), where)
        return {OUR_KEY: "key", "impl": str(jax.random.key_impl(value)), "value": data}
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        return {OUR_KEY: "array", "dtype": array.dtype.str, "shape": [*array.shape], "value": text}
    keys = f" with the keys {list(value)[:3]}" if isinstance(value, dict) else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}{keys}, which a checkpoint cannot store as data. Make "
        "it numbers, strings, bytes, arrays, PRNG keys, or lists, tuples and dicts (with string "
        "keys) of those."
    )


def decode(value: PyTree) -> PyTree:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if OUR_KEY not in value:
        return {key: decode(item) for key, item in value.items()}
    content = value["value"]
    match value[OUR_KEY]:
        case "tuple":
            return tuple(decode(content))
        case "key":
            return jax.random.wrap_key_data(decode(content), impl=value["impl"])
        case "bytes":
            return base64.b64decode(content)
        case "array":
            raw = np.frombuffer(base64.b64decode(content), np.dtype(value["dtype"]))
            return raw.reshape(value["shape"])
    raise ValueError(f"unknown kind of value: {value[OUR_KEY]!r}")


def _gathered(text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    raw = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(raw.size)).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: raw.size] = raw
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]
