"""Which optimizer state rests in host memory."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._update.offload import POOL_LIMIT, Offload, as_offload, check_pool, told_of_pool

SIZES = [100, 400, 50, 300]


@pytest.mark.parametrize(
    ("share", "goes"),
    [(True, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3}), (False, set()), (0.0, set()), (0.5, {1, 3}),
     (0.47, {1}), (0.9, {0, 1, 3})],
)  # fmt: skip
def test_the_largest_leaves_go_until_they_have_the_share(share, goes):
    why = Offload(opt_state=share, min_bytes=1).stay("opt_state", SIZES, SIZES)
    assert {k for k, reason in enumerate(why) if reason is None} == goes
    assert {reason for reason in why if reason} <= {f"opt_state={share} is reached"}
    assert Offload(opt_state=0, params=share, min_bytes=1).stay("params", SIZES, SIZES) == [
        reason and reason.replace("opt_state", "params") for reason in why
    ]


def test_what_travels_in_small_pieces_stays():
    why = Offload(min_bytes=100).stay("opt_state", SIZES, [100, 99, 50, 300])
    assert why == [None, "smaller than 100 B", "smaller than 100 B", None]


@pytest.mark.parametrize(
    ("room", "used", "goes"),
    [(1000, 0, {0, 1, 2, 3}), (850, 0, {0, 1, 2, 3}), (849, 0, {0, 1, 3}), (450, 0, {1, 2}),
     (450, 100, {2, 3}), (100, 100, set()), (0, 0, set())],
)  # fmt: skip
def test_as_many_as_have_room(room, used, goes):
    """The largest first; those that are too large leave the room to smaller ones."""
    why = Offload(min_bytes=1, max_bytes=room).stay("opt_state", SIZES, SIZES, used)
    assert {k for k, reason in enumerate(why) if reason is None} == goes
    stays = f"max_bytes={room} has no room for it"
    assert {reason for reason in why if reason} <= {stays}


def test_the_optimizer_state_goes_first():
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((32, 64))}
    state = (params, optax.adam(1e-3).init(params))
    one = 8192  # bytes of b, half of a's
    plan = zerojax.plan(
        state, stage=0, offload=Offload(params=True, min_bytes=0, max_bytes=7 * one)
    )
    assert {leaf.path for leaf in plan.leaves if leaf.is_on_host} == {
        "1/0/mu/a", "1/0/mu/b", "1/0/nu/a", "1/0/nu/b", "0/b",
    }  # fmt: skip
    assert "device: max_bytes=57344 has no room for it" in str(plan)


def test_short_forms():
    assert as_offload(None) is None
    assert as_offload("opt_state") == Offload(opt_state=True, params=False)
    assert as_offload(("opt_state", "params")) == Offload(opt_state=True, params=True)
    assert as_offload(["params"]) == Offload(opt_state=False, params=True)
    assert as_offload(Offload(0.5)) == Offload(opt_state=0.5)


@pytest.mark.parametrize("wrong", ["activations", True, 0.5, (), {"opt_state"}, [["params"]]])
def test_another_offload_is_refused(wrong):
    with pytest.raises(ValueError, match=r"Pass 'opt_state', \('opt_state', 'params'\), or zeroj"):
        as_offload(wrong)


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", None])
def test_another_share_is_refused(share):
    with pytest.raises(ValueError, match=r"Pass a number from 0.0 to 1.0"):
        Offload(opt_state=share)
    with pytest.raises(ValueError, match=r"params=.*Pass a number from 0.0 to 1.0"):
        Offload(params=share)


@pytest.mark.parametrize("count", [-1, 0.5, 65536.0, True])
def test_another_number_of_bytes_is_refused(count):
    with pytest.raises(ValueError, match="Pass an integer, 0 for all leaves"):
        Offload(min_bytes=count)
    with pytest.raises(ValueError, match=r"max_bytes=.* Pass an integer, or leave it out"):
        Offload(max_bytes=count)


def test_more_than_xla_pins_is_refused(monkeypatch):
    monkeypatch.delenv(POOL_LIMIT, raising=False)
    check_pool(64 * 2**30)
    with pytest.raises(ValueError, match=rf"set {POOL_LIMIT}=111 before JAX starts; otherwise"):
        check_pool(100 * 2**30 + 1)
    with pytest.raises(ValueError, match=r"zerojax.Offload\(..., max_bytes=8589934592\)"):
        check_pool(100 * 2**30, devices=8)
    monkeypatch.setenv(POOL_LIMIT, "111")
    check_pool(100 * 2**30 + 1)


@pytest.mark.parametrize("given", ["all", "64GB", "inf", "-1", "0", ""])
def test_a_limit_that_is_none(given, monkeypatch):
    monkeypatch.setenv(POOL_LIMIT, given)
    with pytest.raises(ValueError, match=rf"'{given}' is no number of GiB\. Set it to 64"):
        check_pool(1)
    assert told_of_pool(0) == []


def test_where_nothing_goes_it_warns():
    small = {"w": jnp.ones((8, 8))}
    with pytest.warns(UserWarning, match=r"Offload\(.* puts nothing in host memory"):
        zerojax.plan((small, optax.adam(1e-3).init(small)), offload="opt_state")
    with pytest.warns(UserWarning, match="none of that kind, or all of it is too small"):
        zerojax.plan((small, optax.sgd(1e-3).init(small)), offload=Offload(min_bytes=0))


def test_shares_may_be_numpys():
    assert Offload(opt_state=np.float32(0.5)).opt_state == 0.5
