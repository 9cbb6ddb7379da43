"""Experts with rooms of a fixed size: rows that find a room full skip it."""

from typing import Any

import jax
import jax.numpy as jnp

from tests.support.experts import table as _e
from tests.support.experts.table import EXPERTS, HIDDEN, Case, case
from tests.support.sequences.table import DIM

SHAPES = {"router": (DIM, EXPERTS), "up": (EXPERTS, DIM, HIDDEN), "down": (EXPERTS, HIDDEN, DIM)}
BIASED = SHAPES | {"bias_up": (EXPERTS, HIDDEN), "bias_down": (EXPERTS, DIM)}


def seats(mask, room, taken: Any = 0.0):
    """Of (group, token, expert), the seat that a token has in an expert, one-hot, or none."""
    seat = jnp.cumsum(mask, axis=1) - 1 + taken
    return jax.nn.one_hot(seat.astype(jnp.int32), room) * mask[..., None]


def balance_of(probs, mask):
    return EXPERTS * jnp.sum(mask.mean((0, 1)) * probs.mean((0, 1)))


# -- sent by matmuls with what is one-hot


@case("up|down")
def switch() -> Case:
    """Groups are rows. Experts have biases."""

    def mixture(p, x):
        probs = jax.nn.softmax(x @ p["router"])
        mask = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
        dispatch = seats(mask, 3)
        combine = dispatch * probs.max(-1)[..., None, None]
        inside = jnp.einsum("gsec,gsd->gecd", dispatch, x)
        hidden = jnp.einsum("gecd,edf->gecf", inside, p["up"]) + p["bias_up"][:, None]
        y = jnp.einsum("gecf,efd->gecd", jax.nn.gelu(hidden), p["down"]) + p["bias_down"][:, None]
        return jnp.einsum("gsec,gecd->gsd", combine, y), balance_of(probs, mask)

    return _e.language_model(mixture, BIASED, scanned=jax.checkpoint)


@case("up|down")
def gshard() -> Case:
    """Groups are of 8 tokens, across rows. The second choice sits behind all first ones."""

    def mixture(p, x):
        groups = x.reshape(-1, 8, DIM)
        probs = jax.nn.softmax(groups @ p["router"])
        first = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
        rest = probs * (1 - first)
        second = jax.nn.one_hot(rest.argmax(-1), EXPERTS)
        weight1, weight2 = (jnp.sum(probs * mask, -1)[..., None, None] for mask in (first, second))
        behind = seats(second, 2, first.sum(1, keepdims=True))
        combine = seats(first, 2) * weight1 + behind * weight2
        combine = combine / (weight1 + weight2)
        dispatch = (combine > 0).astype(x.dtype)
        inside = jnp.einsum("gsec,gsd->egcd", dispatch, groups)
        hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", inside, p["up"]))
        y = jnp.einsum("egcf,efd->egcd", hidden, p["down"])
        y = jnp.einsum("gsec,egcd->gsd", combine, y)
        return y.reshape(x.shape), balance_of(probs, first)

    return _e.language_model(mixture, SHAPES, attends=True)


@case(r"wi_|wo")
def maxtext_dense() -> Case:
    """Two choices, which sit in the order of tokens."""
    top, room = 2, 4

    def mixture(p, x):
        weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), top)
        mask = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
        place = jnp.cumsum(mask.reshape(len(x), -1, EXPERTS), axis=1).reshape(mask.shape) * mask
        place = jnp.where(place <= room, place, 0)
        seat = jax.nn.one_hot(place, room + 1)[..., 1:]
        combine = jnp.einsum("BSK,BSKEC -> BSEC", weight, seat)
        dispatch = jnp.einsum("BSM,BSEC -> EBCM", x, seat.sum(2))
        gate = jnp.einsum("EBCM,EMH -> EBCH", dispatch, p["wi_0"])
        gate = gate + p["wi_0_bias"][:, None, None, :]
        up = jnp.einsum("EBCM,EMH -> EBCH", dispatch, p["wi_1"])
        y = jnp.einsum("EBCH,EHM -> EBCM", jax.nn.silu(gate) * up, p["wo"])
        y = y + p["wo_bias"][:, None, None, :]
        return jnp.einsum("EBCM,BSEC -> BSM", y, combine)

    up, biases = (EXPERTS, DIM, HIDDEN), {"wi_0_bias": (EXPERTS, HIDDEN)}
    biases |= {"wo_bias": (EXPERTS, DIM)}
    shapes = {"gate": (DIM, EXPERTS), "wi_0": up, "wi_1": up, "wo": (EXPERTS, HIDDEN, DIM)}
    return _e.language_model(mixture, shapes | biases, scanned=jax.checkpoint)


# -- sent by scatter and gather


@case("up|down")
def scattered() -> Case:
    """One choice; rooms are filled from all rows of a device."""

    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        probs = jax.nn.softmax(flat @ p["router"])
        expert, gate = probs.argmax(-1), probs.max(-1)
        mask = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
        seat = jnp.sum((jnp.cumsum(mask, 0) - 1) * mask, axis=-1)
        rooms = jnp.zeros((EXPERTS, 5, DIM)).at[expert, seat].add(flat, mode="drop")
        hidden = jnp.einsum("ecd,edf->ecf", rooms, p["up"]) + p["bias_up"][:, None]
        y = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(hidden), p["down"]) + p["bias_down"][:, None]
        y = y.at[expert, seat].get(mode="fill", fill_value=0)
        return (y * gate[:, None]).reshape(x.shape)

    return _e.language_model(mixture, BIASED)


@case("up|down")
def tutel() -> Case:
    """Two choices; rooms stand in one array, and behind them one row for those that are full."""
    top, room = 2, 8

    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        weight, chosen = jax.lax.top_k(jax.nn.softmax(flat @ p["router"]), top)
        expert = chosen.T.reshape(-1)  # all first choices, then all second ones
        mask = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
        seat = jnp.take_along_axis(jnp.cumsum(mask, 0) - 1, expert[:, None], axis=1)[:, 0]
        at = jnp.where(seat < room, expert * room + seat, EXPERTS * room)
        rooms = jnp.zeros((EXPERTS * room + 1, DIM)).at[at].add(jnp.tile(flat, (top, 1)))
        rooms = rooms[:-1].reshape(EXPERTS, room, DIM)
        hidden = jax.nn.relu(rooms @ p["up"] + p["bias_up"][:, None])
        y = (hidden @ p["down"] + p["bias_down"][:, None]).reshape(-1, DIM)
        y = jnp.take(jnp.concatenate([y, jnp.zeros((1, DIM))]), at, axis=0)
        return jnp.einsum("ktd,tk->td", y.reshape(top, -1, DIM), weight).reshape(x.shape)

    return _e.language_model(mixture, BIASED, scanned=lambda body: body)


# -- experts that choose


def chosen_by_experts(p, x):
    """Of (token, dim): each expert takes its 4 best tokens."""
    weight, index = jax.lax.top_k(jax.nn.softmax(x @ p["router"]).T, 4)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x[index], p["up"]))
    y = jnp.einsum("ecf,efd->ecd", hidden, p["down"]) * weight[..., None]
    return jnp.zeros_like(x).at[index].add(y)


@case("up|down")
def expert_choice() -> Case:
    mixture = lambda p, x: chosen_by_experts(p, x.reshape(-1, DIM)).reshape(x.shape)
    return _e.language_model(mixture, SHAPES)


@case("up|down")
def expert_choice_by_row() -> Case:
    """Written for one row."""
    mixture = jax.vmap(chosen_by_experts, in_axes=(None, 0))
    return _e.language_model(mixture, SHAPES, scanned=jax.checkpoint)


@case("up|down")
def soft_mixture() -> Case:
    """Each seat is a mean of all tokens of a row, and each token one of all seats."""
    room = 2

    def mixture(p, x):
        unit = lambda a, axis: a / jnp.linalg.norm(a, axis=axis, keepdims=True)
        logits = jnp.einsum("bmd,dnp->bmnp", unit(x, -1), unit(p["phi"], 0))
        inside = jnp.einsum("bmd,bmnp->bnpd", x, jax.nn.softmax(logits, axis=1))
        hidden = jnp.einsum("bnpd,ndf->bnpf", inside, p["up"]) + p["bias_up"][:, None]
        y = jnp.einsum("bnpf,nfd->bnpd", jax.nn.gelu(hidden), p["down"]) + p["bias_down"][:, None]
        combine = jax.nn.softmax(logits.reshape(*logits.shape[:2], -1)).reshape(logits.shape)
        return jnp.einsum("bnpd,bmnp->bmd", y, combine)

    shapes = BIASED | {"phi": (DIM, EXPERTS, room)}
    del shapes["router"]
    return _e.language_model(mixture, shapes)
