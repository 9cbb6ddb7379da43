"""The memory of a host that XLA pins for GPUs. CPUs have no such limit, so no step shows it."""

import pytest

from zerojax._plan.offload import POOL_LIMIT, check_pool, told_of_pool

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
