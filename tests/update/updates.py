"""Updates of optax as functions of lists of arrays."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax._update.parts import Update

LAYERS = 3
PARAMS = {
    "embed": jax.ShapeDtypeStruct((32, 8), "float32"),
    "blocks": {
        "w": jax.ShapeDtypeStruct((LAYERS, 16, 24), "float32"),
        "up": jax.ShapeDtypeStruct((LAYERS, 24, 16), "float32"),
        "norm": jax.ShapeDtypeStruct((LAYERS, 8), "float32"),
    },
}


def is_stack(shape):
    return len(shape.shape) >= 2 and shape.shape[0] == LAYERS


def update_of(tx, params=PARAMS):
    """The update of an optimizer, in parts, and the names of its inputs and results.

    What is an array rests in host memory.
    """
    state = jax.eval_shape(tx.init, params)
    (p, of_params), (s, of_state) = jax.tree.flatten(params), jax.tree.flatten(state)

    def function(values):
        grads, params, state = values[: len(p)], values[len(p) : 2 * len(p)], values[2 * len(p) :]
        grads, params = of_params.unflatten(grads), of_params.unflatten(params)
        updates, state = tx.update(grads, of_state.unflatten(state), params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    shapes = [*p, *p, *s]
    streamed = [False] * (2 * len(p)) + [bool(x.shape) for x in s]
    names = [jax.tree_util.keystr(path, simple=True, separator="/")
             for path, _ in jax.tree_util.tree_leaves_with_path((params, state))]  # fmt: skip
    return function, shapes, Update(function, shapes, streamed, list(map(is_stack, shapes))), names


def values_of(shapes, seed=0):
    """Numbers for each shape; counts are 1."""
    keys = map(lambda n: jax.random.fold_in(jax.random.key(seed), n), itertools.count())

    def value(shape):
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return jax.random.uniform(next(keys), shape.shape, shape.dtype, 0.1, 1.0)
        return jnp.ones(shape.shape, shape.dtype)

    return list(map(value, shapes))


def as_numbers(values):
    return [np.asarray(value) for value in values]
