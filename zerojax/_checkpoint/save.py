"""Saves and restores states as Orbax checkpoints that open at any stage on any number of devices.

The saved tree is the same at every stage; only the placement of its leaves differs. So a restore
reads each shard of the new placement straight from the file.
"""

import functools
import glob
import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import keystr

from zerojax import _fingerprint
from zerojax._checkpoint import extras as _extras, files as _files, matching as _matching
from zerojax._checkpoint.extras import Extras, Json
from zerojax._declared import checked
from zerojax._plan.padding import Shape, padded_shapes, remember
from zerojax._plan.plan import Plan
from zerojax._run import agreement as _agreement
from zerojax._state import refusals as _refusals, state as _state
from zerojax._types import PyTree

# Chunks are small, so that a restore reads a shard without the rest of its leaf.
CHUNK_BYTES = 2**25
OWN_DATA = " What a process has of its own, such as a key that it folds, it saves in data=."
ONE_THREAD = threading.RLock()  # begins a write: Orbax mixes up the directories of two at a time


class Handler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler, which drops padding and writes checksums before a checkpoint is complete.

    It saves one state at a time. It does not compress: the floats of a trained state would shrink
    by 8%, and a write in the background would take twice the processor time from the steps.
    """

    # The logical shapes of padded arrays in the save under way, by their names in its files.
    shapes: Mapping[str, Shape] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(use_compression=False, use_zarr3=False, **options)

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        _files.drop_padding(directory, self.shapes)
        _files.write_checksums(directory)


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
class Args(ocp.args.PyTreeSave):
    """Orbax's arguments of a save; Orbax finds the handler by their type."""


@checked
def save(
    path: str | os.PathLike,
    state: PyTree,
    *,
    step: int | None = None,
    rng: PyTree = None,
    data: object = None,
    metadata: PyTree = None,
    plan: Plan | None = None,
) -> None:
    """Writes a state as an Orbax checkpoint; one that fails leaves nothing behind.

    Every process calls it, and each writes its own shards. It overwrites nothing, and refuses a
    second writer to the same path. Use `zerojax.Checkpoints` in a loop.

    Arguments:
        path: a new directory; any that Orbax takes, `gs://` included.
        state: a placed state, or any tree of arrays.
        step, rng: saved with the state.
        data: saved too: the state of the data iterator, or an iterator with `get_state()`, such as
            Grain's; each process saves its own.
        metadata: saved too: numbers, strings, bytes, arrays, and lists, tuples and dicts of them.
        plan: the plan, for states that do not carry an optimizer (tuples, dicts). Files hold arrays
            without padding, and only the plan knows the padding of these.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/100"
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> zerojax.save(path, state, step=100)
        >>> state = zerojax.restore(path, like=zerojax.plan(state, stage=1))
        >>> print(zerojax.checkpoint.read_extras(path).step)
        100
    """
    target = absolute(path)
    check_leaves(state)
    shapes = padded_shapes(state, plan)
    shared, own = _extras.encoded(step, rng, data, metadata, {})
    agree("zerojax.save", target, state, OWN_DATA, **shared, shapes=shapes)
    custom = _extras.pack(shared, own)
    mine = functools.partial(_files.unfinished, target.parent, glob.escape(target.name))
    with ONE_THREAD, _files.only_writer_of_new(target, "Save to a new path.", mine):
        handler = Handler(save_concurrent_gb=_concurrent_gb(state))
        args = save_args(handler, jax.tree.map(_one_replica, state), custom, shapes)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(target, args=args)


@checked
def restore(
    path: str | os.PathLike,
    like: PyTree,
    *,
    keep: str | None = None,
    ignore: str | None = None,
    cast: bool = False,
) -> PyTree:
    """Reads a state into the placement of `like`, whatever stage and devices wrote it.

    Each device reads its own shards, and no device ever has the full state. A step can donate the
    result like any other state. It also opens checkpoints of plain Orbax and Flax.

    Arguments:
        path: a directory that `save` wrote, or one step of `Checkpoints` or of Orbax's manager.
        like: a `Plan` (which needs memory for one state only), a placed state, or an abstract one.
            Leaves without a sharding go to the first local device. For a padded state that does
            not carry an optimizer (a tuple, a dict), pass its plan.
        keep: a path regex; leaves of `like` that match it keep their value and are not read. To
            take over weights alone, keep `"opt_state"`; with `Precision(master=)`, whose masters
            are read with them, `"opt_state/inner"`.
        ignore: a path regex; leaves of the checkpoint that match it need not be in `like`.
        cast: read floats of other dtypes, and cast them to those of `like`.

    Example:
        >>> import tempfile
        >>> params = {"w": jnp.ones((64, 16))}
        >>> make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> path = tempfile.mkdtemp() + "/state"
        >>> zerojax.save(path, zerojax.shard_train_state(make, stage=3))
        >>> two = jax.sharding.Mesh(jax.devices()[:2], ("data",))
        >>> state = zerojax.restore(path, like=zerojax.plan(make, stage=1, mesh=two))
        >>> print(state.opt_state[0].mu["w"].addressable_shards[0].data.shape)
        (32, 16)
    """
    check_like(like)
    plan = like if isinstance(like, Plan) else None
    like = like if plan is None else plan.abstract()
    shapes = padded_shapes(like, plan)
    target = absolute(path)
    is_there = _files.tree_in(target) is not None  # False if the file system is not shared
    options = {"found": is_there, "shapes": shapes, "keep": keep, "ignore": ignore, "cast": cast}
    agree("zerojax.restore", target, like, **options)
    directory = _checked(target)
    with _files.naming("the tree", directory):
        tree = ocp.PyTreeCheckpointHandler().metadata(directory).tree
    leaves = _state.named_leaves(like)
    saved = _matching.saved_leaves(tree)
    values = {}
    for leaf in leaves:  # files have no arrays without elements (`save_args`)
        if leaf.name not in saved and not _matching.nbytes(leaf.value):
            struct = _matching.stored_struct(leaf.value)
            zeros = jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
            values[leaf.name] = _matching.laundered(zeros, leaf.value)
    leaves = [leaf for leaf in leaves if leaf.name not in values]
    conversion = _matching.Conversion(leaves, saved)
    saved = conversion.as_wanted() if conversion.is_needed else saved
    how: Any = {"keep": keep, "ignore": ignore, "cast": cast, "empty": values}
    wanted = _matching.match(leaves, saved, directory, shapes, **how)
    conversion.check_whole(wanted, keep)
    handler = Handler(restore_concurrent_gb=_concurrent_gb(like))
    read = functools.partial(_matching.read, handler, directory, tree)
    values |= conversion.read(wanted, read) if conversion.is_needed else read(wanted)
    state = _matching.filled(like, values)
    named = _state.leaves_with_paths(state) if shapes else ()
    remember((leaf.value, leaf.name, shapes[leaf.name]) for leaf in named if leaf.name in shapes)
    return state


@checked
def read_extras(path: str | os.PathLike, *, data: bool = True) -> Extras:
    """Reads `step`, `rng`, `data` and `metadata`, which were saved with a state.

    `data=False` leaves out the data iterators: only as many processes as saved them can continue
    them.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/100"
        >>> zerojax.save(path, {"w": jnp.ones(8)}, step=100, metadata={"run": "first"})
        >>> extras = zerojax.checkpoint.read_extras(path)
        >>> print(extras.step, extras.metadata)
        100 {'run': 'first'}
    """
    agree("zerojax.checkpoint.read_extras", absolute(path))
    return _extras.unpack(_checked(absolute(path), only=_files.METADATA), path, data=data)


def _checked(path: epath.Path, only: str | None = None) -> epath.Path:
    """Returns the directory of a tree, after a check of its files, or of `only` one."""
    directory = _files.tree_in(path)
    if directory is None:
        raise ValueError(_files.nothing_at(path))
    listed = _extras.check_format(directory)
    if listed or only is None:
        _files.check_files(directory, only, listed)
    return directory


def agree(
    call: str, directory: epath.Path, state: PyTree = None, remedy: str = "", **options: object
) -> None:
    """Raises in every process unless all pass the same directory, leaves and options."""

    def items() -> dict[str, str]:
        leaves = (
            f"{leaf.name} {_fingerprint.of_shapes(leaf.value)} "
            f"{_fingerprint.show(getattr(leaf.value, 'sharding', None))}"
            for leaf in _state.named_leaves(state)
        )
        said = {"the directory": str(directory), "the state": "\n".join(leaves)}
        return said | {name: str(value) for name, value in options.items()}

    _agreement.agree(call, items, remedy=remedy)


def _one_replica(leaf: PyTree) -> PyTree:
    """Returns one copy of a replicated leaf: Orbax would slice the copies on all devices."""
    if jax.process_count() > 1 or not isinstance(leaf, jax.Array):
        return leaf
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def check_leaves(state: PyTree) -> None:
    """Raises for leaves that a restore could not give back, before any file exists."""
    _refusals.check_stored(state)
    leaves = _state.named_leaves(state)
    _state.named_leaves(state, separator=".")  # as Orbax names its files
    _refusals.check_alive(state)
    for leaf in leaves:
        if not _refusals.has_numbers(leaf.value):
            raise TypeError(f"{leaf.name} is a shape without values. Pass a state with arrays.")
        array = leaf.value if isinstance(leaf.value, jax.Array) else np.asarray(leaf.value)
        seen = _state.shape_dtype(leaf.value).dtype  # by a step
        if array.dtype == seen or array.dtype.kind not in "iuf":
            continue
        with np.errstate(all="ignore"):
            cast = array.astype(seen)
        lost, kind = cast != array, "integers"
        if array.dtype.kind == "f":  # rounding is no loss
            lost = (np.isinf(cast) != np.isinf(array)) | ((cast == 0) != (array == 0))
            kind = "floats"
        if lost.any():
            raise ValueError(
                f"{leaf.name} has {kind} that JAX truncates without jax_enable_x64. Set that, or "
                "save them as metadata=."
            )


def check_like(like: PyTree) -> None:
    """Raises for a `like` that has no placement or no arrays."""
    if callable(like) and jax.tree_util.all_leaves([like]) and not _refusals.is_flax_module(like):
        raise TypeError(
            "like= is a function, which has no placement. Pass zerojax.plan(make_state, stage=3), "
            "or a state."
        )
    if not isinstance(like, Plan):
        _refusals.check_stored(like, "like=")


def save_args(
    handler: Handler, state: PyTree, custom: dict[str, Json], shapes: Mapping[str, Shape]
) -> Args:
    """Returns Orbax's arguments: arrays of the dtypes that a step would see, in small chunks.

    The handler drops the padding of leaves with a logical shape in `shapes`. Arrays without
    elements are left out, because Orbax refuses them.
    """

    def as_array(leaf: PyTree) -> jax.Array | np.ndarray | None:
        if not _matching.nbytes(leaf):
            return None
        dtype = _state.shape_dtype(leaf).dtype
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)

    arrays = _without_partials(jax.tree.map(as_array, state))
    jax.block_until_ready(arrays)  # a step that failed raises here, before any file exists
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), arrays)
    padded = [leaf for leaf in _state.leaves_with_paths(arrays) if leaf.name in shapes]
    handler.shapes = {keystr(x.path, simple=True, separator="."): shapes[x.name] for x in padded}
    return Args(arrays, save_args=chunks, custom_metadata=custom)


def _without_partials(tree: PyTree) -> PyTree:
    """Returns a tree with lists for `Partial`s, which Orbax cannot make; no path changes."""

    def is_partial(node: PyTree) -> bool:
        return isinstance(node, jax.tree_util.Partial)

    def plain(node: PyTree) -> PyTree:
        return _without_partials([[*node.args], node.keywords]) if is_partial(node) else node

    return jax.tree.map(plain, tree, is_leaf=is_partial)


def absolute(path: str | os.PathLike) -> epath.Path:
    if not isinstance(path, str | os.PathLike):
        shown = repr(path) if len(repr(path)) < 80 else f"a {type(path).__name__}"
        raise TypeError(f"{shown} is not a path. Pass a str or a pathlib.Path, and then a state.")
    return epath.Path(path if "://" in str(path) else os.path.abspath(os.path.expanduser(path)))


def _concurrent_gb(tree: PyTree) -> float:
    """Returns how much Orbax may have in flight: about the largest leaf."""
    largest = max(map(_matching.nbytes, jax.tree.leaves(tree)), default=0)
    return (largest + CHUNK_BYTES) / 1e9
