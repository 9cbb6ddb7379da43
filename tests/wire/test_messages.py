"""Sums of what travels as codes: one message a hop, and how far off the sums are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from tests.collectives import collectives
from zerojax._wire.codecs import Blocks
from zerojax._wire.messages import summed

AXES = ("a", "b")
# A device's own gradients: three arrays, sharded along other dimensions, one in smaller blocks.
SHAPES, DIMS, BLOCKS = ((16, 256), (64, 512), (8, 8, 96)), (0, 1, 1), (256, 64, 32)


def each():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return [jax.random.normal(key, (8, *shape)) for key, shape in zip(keys, SHAPES, strict=True)]


def summed_on_devices(dtype, axes=AXES):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    codecs = [Blocks(dtype, block=block) for block in BLOCKS]

    def run(arrays):
        return summed([array[0] for array in arrays], DIMS, codecs, axes)

    specs = [P(*[axes if d == dim else None for d in range(dim + 1)]) for dim in DIMS]
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P(AXES), out_specs=specs, check_vma=False)
    )


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("int8", 1e-2), ("int4", 0.2), ("float8_e4m3fn", 4e-2), ("float8_e5m2", 8e-2)],
)
def test_every_device_has_its_part_of_the_sums(dtype, most):
    found = summed_on_devices(dtype)(each())
    for got, arrays in zip(found, each(), strict=True):
        wanted = np.sum(np.asarray(arrays, np.float64), axis=0)
        assert got.dtype == jnp.float32 and got.shape == wanted.shape
        assert most / 4 < np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < most


def test_a_hop_is_one_message_of_bytes():
    jaxpr = summed_on_devices("int4").trace(each()).jaxpr
    messages = [c for c in collectives(jaxpr) if c.kind == "all-to-all"]
    numbers = [int(np.prod(shape)) for shape in SHAPES]
    sizes = [n // 2 + 4 * n // b for n, b in zip(numbers, BLOCKS, strict=True)]
    assert [(m.axes, m.dtype, m.elements) for m in messages] == [
        (("a",), "int8", sum(sizes)),
        (("b",), "int8", sum(sizes) // 2),  # of what is left after the first
    ]


def test_over_no_axes_nothing_is_encoded():
    arrays = [jnp.ones((2, 64))]
    assert summed(arrays, [0], [Blocks()], []) == arrays
