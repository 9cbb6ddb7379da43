"""What a loop over layers does with the parameters that it updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax._collectives import Held, Updating
from zerojax._update.in_loop import InLoop, Layer

PARAM, TRACE, GIVEN = jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3)), jnp.float32(2)


def apply(grad, layers, given):
    param, trace = layers
    trace = given[0] * trace + grad[None]
    return [param - trace, trace]


def operands(trace=TRACE):
    updating = Updating((PARAM, trace), (GIVEN,), apply)
    return [jnp.zeros(4), Held(jnp.zeros((4, 3)), updating=updating), Held(PARAM)]


def test_the_loop_reads_the_parameter_as_it_is_by_now():
    xs = operands()
    in_loop = InLoop(xs)
    assert list(in_loop.updating) == [1]
    now = in_loop.as_updated(xs, [(PARAM + 1, TRACE)])
    assert now[1].updating is None and now[2] is xs[2]
    np.testing.assert_array_equal(now[1].source, PARAM + 1)


@pytest.mark.parametrize("on_host", [False, True])
def test_one_layer_is_updated_and_the_others_stay(on_host):
    trace = jax.device_put(TRACE, jax.memory.Space.Host) if on_host else TRACE
    in_loop = InLoop(operands(trace))
    grads = [jnp.float32(7), Held(jnp.full(3, 0.5)), Held(jnp.ones(3))]

    @jax.jit
    def updated(stacks):
        layer = Layer(2, 2)
        return in_loop.updated(stacks, in_loop.fetched(stacks, layer), grads, layer)

    ((param, new),) = updated(in_loop.stacks)
    np.testing.assert_array_equal(param, PARAM.at[2].add(-2.5))
    np.testing.assert_array_equal(np.asarray(new), TRACE.at[2].set(2.5))
    assert (new.sharding.memory_kind == "pinned_host") == on_host


def test_what_is_left_and_what_leaves_as_gradients():
    in_loop = InLoop(operands())
    grads = [jnp.zeros(()), Held(jnp.ones(3)), Held(jnp.ones(3))]
    left = in_loop.left(grads)
    assert left[1] is None and left[0] is grads[0] and left[2] is grads[2]
    out = in_loop.gradients(left, [(PARAM, TRACE)])[1]
    assert out.shard is None and out.updating.given == (None,)
    # JAX takes it for the gradient of the operand only if it has the same structure.
    structure = lambda x: jax.tree.structure(x, is_leaf=lambda x: x is None)
    assert structure(out) == structure(operands()[1])


def test_what_is_fetched_arrives_with_one_gradient():
    """In host memory alone: elsewhere there is nothing to wait for."""
    left = ([jnp.ones(3)], [jnp.zeros(2), None])

    def barriers(trace):
        in_loop = InLoop(operands(trace))
        jaxpr = jax.make_jaxpr(lambda layers, left: in_loop.tied(layers, left))([[TRACE]], left)
        return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]

    (barrier,) = barriers(jax.device_put(TRACE, jax.memory.Space.Host))
    assert [v.aval.shape for v in barrier.outvars] == [TRACE.shape, (2,)]
    assert not barriers(TRACE)
