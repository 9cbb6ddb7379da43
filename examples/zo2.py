"""The step of ZO2 (arXiv 2503.12668), for `mezo.py --way zo2`: MeZO's, with the parameters in host
memory.

MeZO visits all layers three times a step: to move them forth, back, and to their new place. Here a
layer comes to the devices once. It gets the update of the step before, both losses pass through it,
one after the other, and it goes back. The next one is fetched meanwhile. So each parameter travels
once in each direction in a step, and a device holds a few layers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import train_gpt
from jax import NamedSharding, P

LINEAR = {"axis": 0, "allow_negative_indices": False}  # so that a GPU's engines copy, not kernels


def begun(state):
    """Returns a state with a direction to move along, and how far: not at all."""
    return {**state, "key": jax.random.key(0), "due": jnp.zeros(())}


def steps(model, plan, lr, eps):
    """Returns the step of `mezo.mezo_step` for parameters in host memory, and `settle(state)`.

    A state has the update of its last step, which is due: `settle` makes it. Do so before you
    evaluate or save.
    """
    if jax.__version_info__ < (0, 11) and plan.mesh.devices.flat[0].platform != "cpu":
        raise ValueError("zo2 needs JAX 0.11: XLA of older ones copies other layers to a GPU.")
    block, ends = train_gpt.Block(model.dim, model.dense), (jnp.float32(eps), jnp.float32(-eps))
    whole = lambda tree: jax.lax.with_sharding_constraint(tree, NamedSharding(plan.mesh, P()))

    def step(state, batch, key):
        key = jax.random.fold_in(key, 0)
        of_layer, of_others = keys_of(state["params"], key)

        def embedded(others, _):
            table, positions = (others[name]["embedding"] for name in ("embed", "positions"))
            return table[batch[:, :-1]] + positions

        def passed(layer, x):
            return block.apply({"params": layer}, x, None)[0]

        def loss(others, x):
            x = nn.RMSNorm().apply({"params": others["norm"]}, x)
            logits = x @ others["embed"]["embedding"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        def start(others):
            return at_both(embedded, whole(others), of_others, ends, (None, None))

        def visit(i, layer, xs):
            return at_both(passed, whole(layer), of_layer(i), ends, xs)

        params, others, xs = visited(plan, state, start, visit)
        first, second = at_both(loss, whole(others), of_others, ends, xs)
        slope = (first - second) / (2 * eps)
        state = plan.constrain({"params": params}) | {"key": key, "due": -lr * slope}
        return state, {"loss": (first + second) / 2, "slope": slope[None]}

    def settle(state):
        params, *_ = visited(plan, state, lambda others: (), lambda i, layer, x: x)
        return {**state, **plan.constrain({"params": params}), "due": jnp.zeros(())}

    return jax.jit(step, donate_argnums=0), jax.jit(settle, donate_argnums=0)


def visited(plan, state, start, visit):
    """Makes the update that is due, layer by layer, and calls `visit(i, layer, x)` for each.

    Returns the new parameters in host memory, those outside of layers on the devices too, and the
    last `x`, of which the first is `start(those)`.
    """
    stacks, others = parts(state["params"])
    of_layer, of_others = keys_of(state["params"], state["key"])
    last = len(jax.tree.leaves(stacks)[0]) - 1
    fetched = lambda tree: jax.device_put(tree, jax.memory.Space.Device)
    back = lambda leaf, like: jax.device_put(leaf, jax.typeof(like).memory_space)
    specs = [x.sharding.spec[1:] for x in jax.tree.leaves(plan.abstract()["params"]["blocks"])]
    places = jax.tree.unflatten(
        jax.tree.structure(stacks), [NamedSharding(plan.mesh, P(*spec)) for spec in specs]
    )

    def layer_at(stacks, i):
        sliced = lambda stack: jax.lax.dynamic_index_in_dim(stack, i, keepdims=False, **LINEAR)
        return fetched(jax.tree.map(sliced, stacks))

    def turn(i, carry, is_last=False):
        stacks, layer, x = carry
        layer = along(layer, of_layer(i), state["due"])
        layer = jax.lax.with_sharding_constraint(layer, places)  # devices update their shards
        ahead = new = layer
        if not is_last:  # reads before it writes: XLA would copy the stacks otherwise
            ahead, new = jax.lax.optimization_barrier((layer_at(stacks, i + 1), layer))
        write = lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(
            stack, back(leaf, stack), i, **LINEAR
        )
        return jax.tree.map(write, stacks, new), ahead, visit(i, layer, x)

    new = along(fetched(others), of_others, state["due"])
    carry = jax.lax.fori_loop(0, last, turn, (stacks, layer_at(stacks, 0), start(new)))
    stacks, _, x = turn(last, carry, is_last=True)
    return jax.tree.map(back, new, others) | {"blocks": stacks}, new, x


# ---- directions, as MeZO draws them


def parts(params):
    """Returns the stacks of layers, and all else."""
    return params["blocks"], {name: leaf for name, leaf in params.items() if name != "blocks"}


def keys_of(params, key):
    """Returns a function that gives the keys of a layer's leaves, and those of all others."""
    tree = jax.tree.structure(params)
    stacks, others = parts(jax.tree.unflatten(tree, jax.random.split(key, tree.num_leaves)))
    split = lambda key, stack: jax.random.split(key, len(stack))
    of_layers = jax.tree.map(split, stacks, params["blocks"])
    return lambda i: jax.tree.map(lambda keys: keys[i], of_layers), others


def along(leaves, keys, by):
    move = lambda leaf, key: leaf + by * jax.random.normal(key, leaf.shape, leaf.dtype)
    return jax.tree.map(move, leaves, keys)


def at_both(function, params, keys, ends, xs):
    """Calls `function(params, x)` at both ends of the direction, one after the other.

    Not in a loop: XLA would copy layers before or after it, not beside it.
    """
    first = function(along(params, keys, ends[0]), xs[0])
    # The second draws anew. XLA would keep the direction of the first, as large as a layer.
    keys, xs, first = jax.lax.optimization_barrier((keys, xs, first))
    return first, function(along(params, keys, ends[1]), xs[1])
