"""Which leaves rest in host memory, as the plan has them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Offload
from zerojax._plan.offload import POOL_LIMIT, check_pool, told_of_pool

ELEMENTS = {"a": 100, "b": 400, "c": 50, "d": 300}  # of 4 bytes
PARAMS = {name: jax.ShapeDtypeStruct((size,), "float32") for name, size in ELEMENTS.items()}


def planned(tx=None, **offload):
    """Where the parameters and their optimizer state rest, one device's worth on each."""
    state = PARAMS, (tx or optax.identity()).init(PARAMS)
    return zerojax.plan(state, stage=0, offload=Offload(**{"min_bytes": 0, **offload}))


def on_host(plan):
    return {leaf.path.replace("0/", "") for leaf in plan.leaves if leaf.is_on_host}


@pytest.mark.parametrize(
    ("share", "goes"),
    [(True, "abcd"), (1.0, "abcd"), (0.5, "bd"), (0.47, "b"), (np.float32(0.9), "abd")],
)
def test_the_largest_leaves_go_until_they_have_the_share(share, goes):
    plan = planned(opt_state=False, params=share)
    assert on_host(plan) == set(goes)
    stays = {leaf.stays for leaf in plan.leaves if not leaf.is_on_host}
    assert stays <= {f"params={share} is reached"}
    trace = planned(optax.trace(0.9), opt_state=share)
    assert on_host(trace) == {f"1/trace/{name}" for name in goes}


@pytest.mark.filterwarnings("ignore:.*nothing in host memory")
@pytest.mark.parametrize(
    ("elements", "goes"),
    [(850, "abcd"), (849, "abd"), (450, "bc"), (350, "cd"), (100, "a"), (0, "")],
)
def test_the_largest_that_have_room_go(elements, goes):
    """Those that are too large leave the room to smaller ones."""
    plan = planned(opt_state=False, params=True, max_bytes=4 * elements)
    assert on_host(plan) == set(goes)
    stays = {leaf.stays for leaf in plan.leaves if not leaf.is_on_host}
    assert stays <= {f"max_bytes={4 * elements} has no room for it"}


def test_the_optimizer_state_goes_first():
    plan = planned(optax.trace(0.9), opt_state=True, params=True, max_bytes=4 * (850 + 350))
    assert on_host(plan) == {"1/trace/a", "1/trace/b", "1/trace/c", "1/trace/d", "c", "d"}


@pytest.mark.filterwarnings("ignore:.*nothing in host memory")
def test_what_travels_in_small_pieces_stays():
    """A stack travels a layer at a time."""
    params = {"w": jnp.ones((4, 64, 64)), "table": jnp.ones((64, 64))}
    for least, goes in ((2**14, {"w", "table"}), (2**14 + 1, set())):
        offload = Offload(params=True, opt_state=False, min_bytes=least)
        plan = zerojax.plan((params, ()), stage=0, stacked="w", offload=offload)
        assert on_host(plan) == goes


@pytest.mark.parametrize(
    ("offload", "goes"),
    [
        (None, set()),
        ("opt_state", {"1/trace/w"}),
        (["params"], {"w"}),
        (("opt_state", "params"), {"w", "1/trace/w"}),
        (Offload(), {"1/trace/w"}),
    ],
)
def test_short_forms(offload, goes):
    params = {"w": jnp.ones((256, 256))}
    state = params, optax.trace(0.9).init(params)
    assert on_host(zerojax.plan(state, stage=0, offload=offload)) == goes


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sgd(1e-3)])
def test_where_nothing_goes_it_warns(tx):
    """Some state is too small, and some optimizers have none."""
    with pytest.warns(UserWarning, match=r"Offload\(.* puts nothing in host memory"):
        planned(tx, min_bytes=2**16)


NAMES = r"Pass 'opt_state', \('opt_state', 'params'\), or zeroj"
SHARE = "Pass a number from 0.0 to 1.0"
BYTES = "Pass an integer, "


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        *((lambda wrong=wrong: wrong, NAMES) for wrong in ("activations", True, 0.5, (), [["a"]])),
        (lambda: Offload(opt_state=-0.1), rf"opt_state=-0.1\).*{SHARE}"),
        (lambda: Offload(params=1.5), rf"params=1.5\).*{SHARE}"),
        (lambda: Offload(params="all"), SHARE),
        (lambda: Offload(min_bytes=-1), rf"min_bytes=-1\).*{BYTES}0 for all leaves"),
        (lambda: Offload(min_bytes=True), BYTES),
        (lambda: Offload(max_bytes=0.5), rf"max_bytes=0.5\).*{BYTES}or leave it out"),
    ],
)
def test_another_offload_is_refused(offload, message):
    with pytest.raises(ValueError, match=message):
        zerojax.plan((PARAMS, ()), offload=offload())


# -- the memory of a host that XLA pins for GPUs

GIB = 2**30


def test_more_than_xla_pins_is_refused(monkeypatch):
    monkeypatch.delenv(POOL_LIMIT, raising=False)
    check_pool(64 * GIB)
    with pytest.raises(ValueError, match=rf"set {POOL_LIMIT}=111 before JAX starts. Otherwise"):
        check_pool(100 * GIB + 1)
    with pytest.raises(ValueError, match=r"zerojax.Offload\(..., max_bytes=8589934592\)"):
        check_pool(100 * GIB, devices=8)
    monkeypatch.setenv(POOL_LIMIT, "111")
    check_pool(100 * GIB + 1)


@pytest.mark.parametrize("limit", ["64GB", "-1", "0", ""])
def test_a_limit_that_is_no_number_is_refused(limit, monkeypatch):
    monkeypatch.setenv(POOL_LIMIT, limit)
    with pytest.raises(ValueError, match=rf"'{limit}' must be a number of GiB\. Set it to 64"):
        check_pool(1)
    assert told_of_pool(0) == []
