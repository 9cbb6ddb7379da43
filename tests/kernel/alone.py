"""Trains a stack of layers with the kernel, at a stage, and prints the losses: `alone.py 3`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

from zerojax._kernel.body import How
from zerojax._kernel.device import DeviceLoss, exact_share, param_of, rested, scattered
from zerojax._kernel.places import Placement, groups_of, leaf_at

AXES = ("data",)
STACKED = {"layers/w": True, "layers/b": True, "out": False}
TX = optax.adam(1e-2)
HOW = How(regather=True, prefetch=1, by_data=True)


def make_params():
    draw = np.random.default_rng(1)
    shapes = {"layers": {"w": (3, 16, 16), "b": (3, 16)}, "out": (16, 8)}
    shapes, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([jnp.asarray(draw.normal(size=s) / 4, jnp.float32) for s in shapes])


def rows():
    return jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)


def loss(params, x):
    layer = jax.checkpoint(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None))
    return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] @ params["out"] - x[:, :8]) ** 2)


def planned(tree, groups, is_param):
    """Returns the plan of each leaf: of the optimizer's, that of the parameter that it is like."""

    def leaf(path, value):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        stacked = next((layers for end, layers in STACKED.items() if name.endswith(end)), False)
        reason = None if value.ndim > stacked else "scalar"
        spec = PartitionSpec(*[None] * stacked, *AXES)
        whole = Placement(PartitionSpec()) if reason else Placement(spec, AXES)
        about = {"path": name, "kind": "", "shape": value.shape, "dtype": value.dtype}
        about |= {"stacked": stacked, "reason": reason}
        return leaf_at(whole, groups, is_param=is_param, **about)

    return jax.tree.leaves(jax.tree_util.tree_map_with_path(leaf, tree))


def main(stage):
    mesh = jax.make_mesh((4,), AXES, axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    groups = groups_of(stage, AXES)
    params, x = make_params(), rows()
    opt_state = TX.init(params)
    leaves = planned(params, groups, True), planned(opt_state, groups, False)
    each = leaves[0] + leaves[1]
    jaxpr = jax.make_jaxpr(loss)(params, x[:2]).jaxpr
    each_param = [param_of(leaf, mesh, AXES, groups) for leaf in leaves[0]]
    device = DeviceLoss(jaxpr, each_param, mesh, AXES)

    def on_one_device(values, args):
        share, remaining = exact_share(device.size)
        varied = [p.varied(value) for p, value in zip(device.params, values, strict=True)]

        def scaled(floats):
            inputs = zip(device.params, values, device.with_floats(varied, floats), strict=True)
            (value,) = device.run([*(p.loss_input(*each) for p, *each in inputs), *args], HOW)
            return value * share, value

        grads, value = jax.grad(scaled, has_aux=True)(device.floats(varied))
        pairs = zip(device.params, grads, strict=True)
        return device.device_mean(value), [p.mean(grad, remaining) for p, grad in pairs]

    specs = [leaf.rest.local for leaf in leaves[0]], [PartitionSpec(AXES)]
    results = PartitionSpec(), [leaf.update.local for leaf in leaves[0]]
    on_all_devices = device.on_all_devices(on_one_device, specs, results)

    @jax.jit
    def step(params, opt_state, x):
        values, treedef = jax.tree.flatten((params, opt_state))
        value, grads = on_all_devices(values[: len(leaves[0])], [x])
        shards = [scattered(v, leaf, mesh) for v, leaf in zip(values, each, strict=True)]
        params, opt_state = treedef.unflatten(shards)
        grads = jax.tree.structure(params).unflatten(grads)
        updates, opt_state = TX.update(grads, opt_state, params)
        new = jax.tree.leaves((optax.apply_updates(params, updates), opt_state))
        new = rested(new, each, mesh, AXES, into=[None] * len(new))
        return *treedef.unflatten(new), value

    places = [leaf.rest.sharding(mesh) for leaf in each]
    state = jax.device_put(jax.tree.leaves((params, opt_state)), places)
    state = jax.tree.structure((params, opt_state)).unflatten(state)
    for _ in range(3):
        *state, value = step(*state, x)
        print(float(value))
    parts = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state)]
    held = dict(zip((leaf.path for leaf in each), parts, strict=True))
    print(held["layers/w"])
    print(held["0/mu/layers/w"])
    print(sorted(name for name in sys.modules if name.startswith("zerojax")))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    for number in sys.argv[1:]:
        main(int(number))
