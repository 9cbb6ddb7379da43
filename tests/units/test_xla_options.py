"""The XLA options of a step: which GPUs need them, and what is combined."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support import audits
from tests.support.reference import train_state
from tests.support.schedules import train_step
from zerojax._features import xla_options as xla

LAYER = np.ones((64, 64), "f")


def moved(gathered=0, scattered=0, reduced=0):
    """The bytes of a loop or layer, as `traffic_of` counts them."""
    bytes = {xla.GATHERED: gathered, xla.SCATTERED: scattered, xla.REDUCED: reduced}
    return xla.Traffic(bytes)


@pytest.mark.gpu_code
def test_what_xla_knows_of_gpus():
    """Where it does not know them, it is asked to hide communication; where it knows the wires
    between hosts, large weights wait for gradients."""
    jaxpr = jax.make_jaxpr(lambda x: x)(1.0).jaxpr
    hidden = ("8xA100-80GB", "2xL4", "8xRTX5090")
    for gpus in (*hidden, "1xA100-80GB", "8xH100", "8xB200", "8xB300"):
        options = xla.options_for(jaxpr, zerojax.aot.mesh(gpus), ahead=False)
        assert options.pop(xla.TIME_KERNELS) is False  # there is no GPU to time them
        assert options == ({xla.HIDE_LATENCY: True} if gpus in hidden else {}), gpus
    for gpus in ("8xH100", "16xH100", "16xB200", "16xA100-80GB", "16xRTX5090"):
        knows = xla.knows_wires(zerojax.aot.mesh(gpus))
        assert knows == (gpus in ("16xH100", "16xB200")), gpus


def test_a_layer_is_one_collective_unless_it_is_too_large_for_the_scheduler():
    most, size = 2**32 - 1, 3 * 2**30
    layer = lambda size: [moved(size, size // 8, size), moved(8, 1, 8)]
    above = size + size // 16
    assert xla.combined(layer(size), most) == {
        xla.COMBINE_GATHERS: above, xla.COMBINE_SCATTERS: above // 8,
    }  # fmt: skip
    assert xla.combined(layer(2 * size), most) == {
        xla.COMBINE_GATHERS: most, xla.COMBINE_SCATTERS: most // 8,
        xla.MEMORY_SLOP: 150, xla.IN_FLIGHT: 2,
    }  # fmt: skip
    narrow = xla.combined([moved(size, size // 8, 2 * size)], most)  # gathered in 16 bits
    assert narrow[xla.IN_FLIGHT] == 2 and xla.MEMORY_SLOP not in narrow


def test_what_a_loop_over_layers_gathers_and_reduces_is_counted():
    """A gather's thresholds count what comes out; a reduce-scatter moves what goes in."""
    size, params = LAYER.size * 4, {"layers": np.stack([LAYER] * 3)}
    plan = zerojax.plan({"params": params}, mesh=make_mesh(), stacked="layers")

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0])

    inputs = plan.abstract()["params"], jax.ShapeDtypeStruct((64, 64), "float32")
    jaxpr = jax.make_jaxpr(zerojax.value_and_grad(loss, plan))(*inputs).jaxpr
    (forward, backward), _, _ = xla.traffic_of(jaxpr, microbatches=1)
    assert forward == moved(size)
    assert backward == moved(size, size // 8, size)


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "shape", "wanted"),
    [("16xH100", (2, 8), True), ("8xH100", (2, 4), False), ("8xA100-80GB", (2, 4), True)],
)
def test_two_collectives_are_in_flight_between_hosts(gpus, shape, wanted):
    mesh = zerojax.aot.mesh(gpus, shape, ("node", "gpu"))
    plan = zerojax.plan(audits.make_state, mesh=mesh, axis=("node", "gpu"))
    step = train_step(audits.loss, plan=plan, regather="gpu")
    jaxpr = step._without_options.trace(plan.abstract(), audits.tokens(plan)).jaxpr.jaxpr
    options = xla.options_for(jaxpr, mesh, ahead=True)
    assert options.get(xla.IN_FLIGHT) == (2 if wanted else None)
    assert options[xla.DOUBLE_BUFFER]


def layers_in_line(remat):
    layer = lambda x, w: jnp.tanh(x @ w)
    layer = jax.checkpoint(layer) if remat else layer

    def loss(params, x):
        for w in params["layers"]:
            x = layer(x, w)
        return jnp.mean(x**2)

    return loss


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("stage", "remat", "accumulate"),
    [(2, True, 2), (3, True, 1), (3, True, 2), (3, False, 1), (3, False, 2)],
)
def test_gradients_of_layers_in_no_loop_are_reduced_layer_by_layer(stage, remat, accumulate):
    """And not as one collective, nor all at the end of backward."""
    dim, layers, rows = 4096, 6, 8192
    make = lambda: train_state({"layers": [jnp.ones((dim, dim))] * layers}, optax.adam(1e-3))
    plan = zerojax.plan(make, stage=stage, mesh=zerojax.aot.mesh("16xH100"))
    batch = jax.ShapeDtypeStruct((16 * rows * accumulate, dim), "float32")
    step = train_step(layers_in_line(remat), accumulate=accumulate, roll=False)
    report = zerojax.audit(step, plan.abstract(), zerojax.aot.batch(batch, plan)).check()
    for kind in ("all-gather", "reduce-scatter"):
        largest = max(one.wire_bytes for one in report.traffic if one.kind == kind)
        assert largest <= dim * dim * 4, kind
    if remat:  # the input of each layer, and what two of them compute
        assert report.memory.temporary < (layers + 5) * rows * dim * 4
