"""What is run of each foreign program, and how a text of its authors becomes ours."""

import difflib
import functools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax.training.train_state import TrainState

ROWS = 16
TX = optax.adam(1e-2, eps=1e-3)  # keeps the rounding of tiny gradients small
SOURCES = Path(sys.prefix) / "sources"  # `make foreign` unpacks there what no wheel has
random = np.random.default_rng(0)
KEY = jax.random.key(0)
normal = lambda *shape: random.normal(size=shape).astype(np.float32)
integers = lambda below, *shape: random.integers(0, below, shape).astype(np.int32)
tokens = lambda length, vocab=64: integers(vocab, ROWS, length)
Edit = tuple[str, str]


class Port(NamedTuple):
    """The authors' step `(state, batch) -> (state, loss)` for one device, and how many lines of its
    text have been added and removed to make the program's loss of it."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    lines: tuple[int, int]


class Program(NamedTuple):
    """`mutable` is `train_step`'s, `axis` the mesh's; `unmet` is what an audit at stage 3 rightly
    finds."""

    make: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Any
    mutable: tuple[str, ...] = ()
    unmet: str | None = None
    rng: Any = None
    axis: str = "data"
    port: Port | None = None


class Turns(NamedTuple):
    """States by name, and turns: which of them learns, by a loss `(params, batch, states)`.

    `theirs` is the authors' update `(name, states, batch) -> state` for one device; `after` is what
    becomes of the states when all had their turns.
    """

    make: dict[str, Callable[[], Any]]
    turns: Sequence[tuple[str, Callable[..., Any]]]
    batch: Any
    theirs: Callable[..., Any]
    after: Callable[[Any], Any]


class State(TrainState):
    extra: Any = None


def library(name: str) -> Any:
    """The module; while it is imported, what it warns of is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is missing: `make foreign` installs it")


def state_of(params: Any, **fields: Any) -> Any:
    cls = State if fields else TrainState
    return cls.create(apply_fn=None, params=params, tx=TX, **fields)


def next_token_loss(logits: Any, ids: Any) -> Any:
    of_token = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    return of_token.mean()


# -- texts of the authors


def edited(text: str, edits: Iterable[Edit]) -> str:
    """`text` with each `(before, after)` replaced. A line of `...` stands for any lines; where it
    is the last one, for all that follow."""
    for before, after in edits:
        pattern = re.escape(before).replace(re.escape("...\n"), "(?:.*\n)*?")
        pattern += r"\Z" if before.endswith("...\n") else ""
        text, times = re.subn(pattern, lambda _, after=after: after, text)
        assert times == 1, f"the text has {times} of {before!r}"
    return text


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """How many lines that are not blank have been added, and how many removed."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    count = lambda sign: sum(line[0] == sign and line[1:].strip() != "" for line in lines)
    return count("+"), count("-")


def module(name: str, text: str) -> types.ModuleType:
    sys.modules[name] = types.ModuleType(name)  # dataclasses look for the module of a class
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
    return sys.modules[name]


def ported(name: str, before: str, edits: Iterable[Edit]) -> tuple[Any, Any, tuple[int, int]]:
    """A text of the authors as a module, the same with `edits`, and how many lines these change."""
    after = edited(before, edits)
    return module(name, before), module(f"{name}.ours", after), changed_lines(before, after)


# Of a text that ends with its step for one device: its loss, with the function for the model.
OUT_OF_THE_STEP = (
    ("def train_step(state, batch):\n", "def train_loss(params, batch, apply_fn):\n"),
    (" state.apply_fn(", " apply_fn("),
    (
        "    loss, grads = jax.value_and_grad(loss_fn)(state.params)\n...\n",
        "    return loss_fn(params)\n",
    ),
)


def trained(
    name: str,
    text: str,
    edits: Iterable[Edit],
    batch: Any,
    model: Callable[[Any], tuple[Callable[..., Any], Callable[[], Any]]],
    compiled: Callable[..., Any] = jax.jit,
    **more: Any,
) -> Program:
    """A program of one text; `model` returns the function and the parameters for its module."""
    theirs, ours, lines = ported(name, text, edits)
    apply_fn, init = model(theirs)
    init = jax.jit(init)
    return Program(
        lambda: TrainState.create(apply_fn=apply_fn, params=init(), tx=TX),
        functools.partial(ours.train_loss, apply_fn=apply_fn),
        batch,
        port=Port(compiled(theirs.train_step), lines),
        **more,
    )


@contextmanager
def importable(modules: dict[str, Any]) -> Iterator[None]:
    """Has imports find `modules`. `mock.patch.dict` would forget all else that is imported."""
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, known in before.items():
            sys.modules.pop(name)
            if known is not None:
                sys.modules[name] = known


def absent(*names: str) -> dict[str, Any]:
    """Modules that read data or write logs, of which a step has no need."""
    return {name: mock.MagicMock(name=name) for name in names}


def mapped(step: Callable[..., Any], *others: Any) -> Callable[[Any, Any], Any]:
    """A step for `jax.pmap`, on one device."""
    device = jax.devices()[:1]
    step = jax.pmap(step, "batch", devices=device)

    def run(state, batch):
        args = jax.tree.map(lambda x: x[None], (batch, *others))
        results = step(jax_utils.replicate(state, device), *args)
        return jax.tree.map(lambda x: x[0], results)

    return run
