"""The table of losses with experts, and what most of them stand on.

A case is a loss for one device: it knows of no mesh. Sizes differ, so that a dimension that is
taken for another shows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.support.sequences import table as _t
from tests.support.sequences.table import DIM, VOCAB, filled, next_token_loss, norm, weights

# 2 rows of 12 tokens for each of 8 devices. Of 7 devices, each has 2 of 8 experts, padded.
ROWS, TOKENS, HIDDEN, EXPERTS, LAYERS = 16, 12, 44, 8, 2
KEPT = "kept"  # rows travel to all experts


@dataclasses.dataclass(frozen=True)
class Case:
    params: Any
    loss: Callable[..., Any]  # of parameters, a batch, and a key where there is one
    batch: Any
    rng: jax.Array | None = None
    has_aux: bool = False
    frozen: str = "$."  # the paths of parameters that nothing trains
    codes: str = ""  # the type of their codes


class Row(NamedTuple):
    experts: str  # the paths of experts
    expects: str  # KEPT, or the primitive that gathers them
    close: float  # how far off results may be
    make: Callable[[], Case]


CASES: dict[str, Row] = {}


def case(experts: str, expects: str = KEPT, close: float = 2e-5) -> Callable[..., Any]:
    """Adds a function that makes a case to the table."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[make.__name__] = Row(experts, expects, close, functools.cache(make))
        return make

    return add


def ids() -> Any:
    return _t.tokens(TOKENS, ROWS)


def swiglu(experts: int = EXPERTS) -> dict[str, tuple[int, ...]]:
    """The shapes of a router and of three weights."""
    up, down = (experts, DIM, HIDDEN), (experts, HIDDEN, DIM)
    return {"router": (DIM, experts), "w1": up, "w2": down, "w3": up}


def language_model(
    mixture: Callable[..., Any],
    shapes: Mapping[str, tuple[int, ...]],
    attends: bool = False,
    layers: int = 1,
    scanned: Callable[..., Any] | None = None,
    noisy: bool = False,
) -> Case:
    """A tied language model of layers `x + mixture(p, x)`. `mixture` may return a loss, too. Layers
    are in a list, or stacked for a scan, whose body `scanned` wraps."""
    layers = LAYERS if scanned else layers

    def block(p, x, *key):
        x = x + _t.causal(p, norm(x, p["scale"])) if attends else x
        result = mixture(p, norm(x, p["scale"]), *key)
        y, balance = result if isinstance(result, tuple) else (result, jnp.float32(0))
        return x + y, balance

    def loss(params, ids, *rng):
        x, total = params["embed"][ids], 0.0
        if scanned:
            x, balances = jax.lax.scan(scanned(lambda x, p: block(p, x)), x, params["layers"])
            total = balances.sum()
        else:
            for n, p in enumerate(params["layers"]):
                key = [jax.random.fold_in(key, n) for key in rng]
                x, balance = block(p, x, *key)
                total += balance
        nats = next_token_loss(norm(x, params["scale"]) @ params["embed"].T, ids)
        return nats + 0.1 * total, {"nats": nats, "balance": total}

    shapes = {"scale": (DIM,), **(_t.ATTENTION if attends else {}), **shapes}
    stack = filled({k: jax.ShapeDtypeStruct((layers, *v), jnp.float32) for k, v in shapes.items()})
    stack["scale"] = 1 + stack["scale"] / 4
    if not scanned:
        stack = [jax.tree.map(lambda x, n=n: x[n], stack) for n in range(layers)]
    params = weights(embed=(VOCAB, DIM), scale=(DIM,)) | {"layers": stack}
    return Case(params, loss, ids(), jax.random.key(5) if noisy else None, has_aux=True)
