"""State bytes on each device where nothing divides, against an even share of the logical bytes."""

import pytest

import zerojax
from zerojax._forecast import presets

TABLE = {
    "124m": (6, 12, 48, 100, 384, 400),
    "1.5b": (6, 12, 48, 100, 384),
    "7.5b": (6, 12, 48, 100, 384, 400),
    "100b": (6, 12, 48, 100, 384, 400, 1000),
    "1t": (6, 12, 48, 100, 384, 400, 1000),
    "llama-70b": (6, 12, 48, 100, 384, 400, 1000),
}
# A dimension of n elements grows by less than N / n: too narrow for 3%, each by its width.
NARROW = {("124m", 1000): 1.213, ("1.5b", 400): 1.040, ("1.5b", 1000): 1.040, ("7.5b", 1000): 1.057}
CASES = {(name, count): 1.03 for name, counts in TABLE.items() for count in counts} | NARROW


@pytest.mark.gpu_code
@pytest.mark.parametrize(("name", "count"), CASES)
def test_each_device_has_little_more_than_its_share(name, count):
    per_host = next(n for n in (8, 6, 4) if count % n == 0)
    mesh = zerojax.aot.mesh(f"{count}xH100", per_host=per_host)
    plan = zerojax.plan(presets.preset(name).make_state, mesh=mesh)
    logical = sum(leaf.nbytes for leaf in plan.leaves)
    here = sum(plan.bytes_per_device().values())
    assert logical <= here * count <= CASES[name, count] * logical
    by_leaf = {x.path: x.bytes_per_device(mesh) * count / x.nbytes for x in plan.params}
    replicated = {x.path for x in plan.params if x.rest.dim is None}
    assert all(one <= 2 for path, one in by_leaf.items() if path not in replicated)
