"""Layered accumulation: the numbers of `accumulate=`, each layer gathered once a step."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests import families
from tests.collectives import collectives, scans_of
from tests.conftest import make_mesh, mostly_slow
from tests.models import OPTIMIZERS, Model, gpt, gpt_block, gpt_params, norm
from tests.reference import assert_close, make_state
from tests.step import tensor
from zerojax._forecast import presets as _presets

LAYERS, DIM, TOKENS, ROWS, STEPS = 3, 32, 16, 64, 3


def rich_loss(params, batch, rng, batch_stats, wrap=jax.checkpoint):
    """Two loops over layers, and whatever else a loss can do: keys for each layer, exact means,
    fields of the state, aux that has rows, means, counts and what does not depend on the batch."""
    keys = jax.random.split(rng, LAYERS + 1)

    def layer(x, scanned):
        p, key, mean = scanned
        new = 0.9 * mean + 0.1 * x.mean((0, 1))
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, gpt_block(p, x - 0.1 * mean), 0.0), (new, jnp.abs(x).max())

    x = params["embed"][batch["tokens"]] + params["pos"]
    x = x + 0.1 * jax.random.normal(keys[-1], x.shape)
    x, (means, largest) = jax.lax.scan(
        wrap(layer), x, (params["blocks"], keys[:-1], batch_stats["means"])
    )
    mix = lambda carry, w: ((carry[0] + jnp.tanh(carry[0] @ w), carry[1] + 1), None)
    (x, layers), _ = jax.lax.scan(mix, (x, 0), params["mix"], reverse=True)
    logits = norm(x, params["norm"]) @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
    loss = zerojax.mean(losses, where=batch["mask"][:, None])
    aux = {
        "batch_stats": {"means": means, "seen": batch_stats["seen"] + 1},
        "largest": largest.max(),
        "by_row": losses.mean(1),
        "layers": layers,
        "norm": jnp.sum(params["norm"] ** 2),
    }
    return loss + 1e-3 * jnp.sum(params["mix"] ** 2), aux


def rich(wrap=jax.checkpoint) -> Model:
    keys = jax.random.split(jax.random.key(11), 3)
    params = gpt_params() | {"mix": 0.2 * jax.random.normal(keys[0], (2, DIM, DIM))}
    batch = {
        "tokens": jax.random.randint(keys[1], (ROWS, TOKENS), 0, 7),
        "mask": jax.random.bernoulli(keys[2], 0.6, (ROWS,)),
    }
    fields = {"batch_stats": {"means": jnp.zeros((LAYERS, DIM)), "seen": jnp.zeros((), jnp.int32)}}
    return Model(params, functools.partial(rich_loss, wrap=wrap), batch, keys[0], fields)


MODELS = {
    "gpt": lambda: gpt(remat=False),
    "gpt, remat": lambda: gpt(remat=True),
    "rich": lambda: rich(lambda f: f),
    "rich, remat": rich,
}


def run(model, order, tx, *, stage=3, accumulate=4, mesh=None, steps=STEPS, **options):
    """A state after some steps, the last metrics and the step."""
    placing = {k: options.pop(k) for k in ("groups", "precision", "offload") if k in options}
    mesh = make_mesh() if mesh is None else mesh
    state = zerojax.shard_train_state(make_state(model, tx), stage, mesh=mesh, **placing)
    step = zerojax.train_step(
        model.loss, accumulate=accumulate, order=order, mutable=tuple(model.fields), **options
    )
    args = (model.batch, *([] if model.rng is None else [model.rng]))
    for _ in range(steps):
        state, metrics = jax.block_until_ready(step(state, *args))
    return state, metrics, step


def same(model, tx, tolerance=1e-6, **options):
    """Runs a step in layers beside one that takes its microbatches in turn."""
    state, metrics, step = run(model, "layers", tx, **options)
    options.pop("activations", None)
    options["update"] = "after"
    wanted, wanted_metrics, _ = run(model, "microbatches", tx, **options)
    for got, want in ((metrics, wanted_metrics), (state, wanted)):
        got, want = jax.device_get((got, want))
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want), tolerance)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding
    return state, metrics, step


CASES = list(itertools.product(MODELS, (0, 1, 2, 3), (0, 1), (2, 4)))
QUICK = {
    ("gpt, remat", 1, 1, 4), ("rich, remat", 3, 1, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "stage", "prefetch", "accumulate"), mostly_slow(CASES, lambda *case: case in QUICK)
)
def test_the_numbers_are_those_of_microbatches_in_turn(model, stage, prefetch, accumulate):
    options = {"stage": stage, "prefetch": prefetch, "accumulate": accumulate}
    same(MODELS[model](), optax.adam(1e-2, eps=1e-3), **options)


@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, lambda name: name == "clip_schedule"))
def test_every_optimizer_gets_the_same_gradients(optimizer):
    same(gpt(remat=True), OPTIMIZERS[optimizer](), tolerance=2e-5, prefetch=1)


def of_families():
    made = {name: None for name in families.FAMILIES if "scan" in name or name in ("plain",)}
    return mostly_slow([*made, "equinox"], lambda name: name == "linen_scan_remat")


@pytest.mark.parametrize("name", of_families())
def test_the_layers_of_every_library_are_found(name):
    family = families.FAMILIES[name]()
    if family.objects or not family.scans:
        pytest.skip("not a state with a scan")
    found = {}
    for order in ("microbatches", "layers"):
        mesh = family.mesh or make_mesh()
        state = zerojax.shard_train_state(family.make, 3, mesh=mesh)
        rows = 2 * mesh.shape["data"]
        step = zerojax.train_step(family.loss, accumulate=2, order=order, prefetch=1)
        found[order] = jax.device_get(step(state, families.BATCH[:rows]))
    got, want = map(jax.tree.leaves, found.values())
    assert_close(want, got, 1e-5)


@pytest.mark.parametrize(
    ("params", "prefetch"),
    mostly_slow(
        itertools.product((("gpu",), ("gpu", "node")), (0, 1)), lambda *case: case == (("gpu",), 1)
    ),
)
def test_groups_on_two_levels(params, prefetch):
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    groups = {"params": params, "grads": ("gpu", "node"), "opt_state": ("gpu", "node")}
    options = {"mesh": mesh, "groups": groups, "prefetch": prefetch}
    same(rich(), optax.adam(1e-2, eps=1e-3), **options)


def test_a_tensor_axis_beside_the_batch():
    found = {}
    for order in ("microbatches", "layers"):
        state = tensor.placed(tensor.cpu_mesh(), 3)
        step = zerojax.train_step(tensor.scanned, accumulate=4, order=order, prefetch=1)
        found[order] = jax.device_get(step(state, tensor.BATCH))
    got, want = map(jax.tree.leaves, found.values())
    assert_close(want, got, 1e-5)


# -- collectives


@pytest.mark.parametrize("prefetch", mostly_slow((0, 1), bool))
def test_each_layer_is_gathered_twice_and_reduced_once_a_step(prefetch):
    model = gpt(remat=True)
    moved = {}
    for order, accumulate in (("microbatches", 1), ("microbatches", 4), ("layers", 4)):
        options = {"accumulate": accumulate, "prefetch": prefetch, "steps": 1}
        state, _, step = run(model, order, optax.adam(1e-2), **options)
        found = list(collectives(step.trace(state, model.batch).jaxpr))
        for kind in ("all-gather", "reduce-scatter"):
            moved[kind, order, accumulate] = sum(c.moved for c in found if c.kind == kind)
    for kind in ("all-gather", "reduce-scatter"):
        once = moved[kind, "microbatches", 1]
        assert moved[kind, "layers", 4] == once > 0
        assert moved[kind, "microbatches", 4] >= 3.5 * once


def test_what_comes_from_weights_alone_is_computed_once_a_layer():
    """A cast inside of `jax.checkpoint` is not repeated for each microbatch, and the weights are
    gathered as what they are cast to."""

    def loss(params, batch):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None))
        return jnp.mean(jax.lax.scan(layer, batch.astype(jnp.bfloat16), params["w"])[0]) * 1.0

    params = {"w": jnp.ones((4, 64, 64)) / 8}
    model = Model(params, lambda p, b: loss(p, b).astype(jnp.float32), jnp.ones((ROWS, 64)))
    state, _, step = run(model, "layers", optax.sgd(0.1), steps=1)
    found = collectives(step.trace(state, model.batch).jaxpr)
    assert {c.dtype for c in found if c.kind == "all-gather"} == {"bfloat16"}


def test_the_head_of_one_microbatch_at_a_time_is_kept():
    """No array of all microbatches' logits, in either direction."""
    model = gpt(remat=True)
    state, _, step = run(model, "layers", optax.sgd(0.1), steps=1)
    logits = (4, ROWS // 32, TOKENS, 64)
    for scan in scans_of(step.trace(state, model.batch).jaxpr, nested=True):
        assert logits not in [v.aval.shape for v in scan.outvars]


# -- what goes with it


def test_updates_in_backward():
    state, _, step = same(gpt(remat=True), optax.adam(1e-2, eps=1e-3), update="backward")
    jaxpr = step.trace(state, gpt(remat=True).batch).jaxpr
    assert any(e.primitive.name == "sqrt" for s in scans_of(jaxpr) for e in eqns_of(s))


def heads(compute: str = "float32") -> Model:
    """A loss with an exact mean, and weights of three dimensions."""

    def layer(x, p):
        y = jnp.tanh(jnp.einsum("bd,hdk->bhk", x, p["in"]))
        return x + jnp.einsum("bhk,hkd->bd", y, p["out"]), None

    def loss(params, batch):
        x, params = jax.tree.map(lambda v: v.astype(compute), (batch["x"], params))
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        squares = x.astype("float32") ** 2
        return zerojax.mean(squares, where=batch["mask"][:, None])

    keys = jax.random.split(jax.random.key(5), 4)
    params = {
        "in": jax.random.normal(keys[0], (LAYERS, 4, DIM, 8)) / 6,
        "out": jax.random.normal(keys[1], (LAYERS, 4, 8, DIM)) / 6,
    }
    mask = jax.random.bernoulli(keys[2], 0.6, (ROWS,))
    return Model(params, loss, {"x": jax.random.normal(keys[3], (ROWS, DIM)), "mask": mask})


@pytest.mark.parametrize("options", [{"update": "backward"}, {"activations": "host"}])
def test_an_exact_mean_goes_with_all_of_it(options):
    same(heads(), optax.adam(1e-2, eps=1e-3), **options)
    if "activations" in options:
        state, _, _ = run(heads(), "microbatches", optax.sgd(0.1), **options)
        wanted, _, _ = run(heads(), "microbatches", optax.sgd(0.1))
        assert_close(state.params, wanted.params, 1e-6)


def test_narrow_weights_of_three_dimensions():
    same(heads("bfloat16"), optax.sgd(0.1), tolerance=2e-2)


def eqns_of(scan: Any):
    inner = scan.params["jaxpr"]
    return getattr(inner, "jaxpr", inner).eqns


@pytest.mark.parametrize(
    "update", mostly_slow(("after", "backward"), lambda update: update == "backward")
)
def test_state_and_activations_in_host_memory(update):
    offload = zerojax.Offload(params=True, min_bytes=0)
    options = {"offload": offload, "activations": "host", "prefetch": 1, "update": update}
    same(gpt(remat=True), optax.adam(1e-2, eps=1e-3), **options)


def test_value_and_grad():
    model = rich()
    loss = functools.partial(model.loss, **model.fields)
    plan = zerojax.plan({"params": model.params}, stage=3, mesh=make_mesh())
    params = plan.place({"params": model.params})["params"]
    found = []
    for order in ("microbatches", "layers"):
        options = {"has_aux": True, "accumulate": 4, "order": order}
        fn = jax.jit(zerojax.value_and_grad(loss, plan, **options))
        found.append(jax.device_get(fn(params, model.batch, model.rng)))
    assert_close(found[1], found[0], 1e-6)


def test_one_microbatch_has_no_order():
    """One microbatch is one program, in layers or not; nothing is refused either."""
    model = gpt(remat=True)
    (got, *_), (want, *_) = (
        run(model, order, optax.sgd(0.1), accumulate=1, steps=1)
        for order in ("layers", "microbatches")
    )
    assert_close(jax.device_get(got.params), jax.device_get(want.params), 0.0)


def test_the_loss_inside_of_one_checkpoint():
    """The loop is found inside of `jax.checkpoint`, and layers of layers in a loop."""
    params = {"w": jax.random.normal(jax.random.key(0), (2, 2, 32, 32)) / 6}

    def groups(x, ws):
        layer = lambda x, w: (jnp.tanh(x @ w), x.mean())
        return jax.lax.scan(layer, x, ws)

    for wrap in (lambda f: f, jax.checkpoint):

        def loss(params, batch, wrap=wrap):
            run = wrap(lambda params, x: jax.lax.scan(groups, x, params["w"]))
            x, means = run(params, batch)
            return jnp.mean(x**2), {"means": means}

        batch = jax.random.normal(jax.random.key(1), (ROWS, 32))
        same(Model(params, loss, batch), optax.sgd(0.1), prefetch=1)


# -- refusals


def refused(loss, match, params=None, **options):
    params = {"w": jnp.ones((4, 64, 64))} if params is None else params
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    step = zerojax.train_step(loss, **{"accumulate": 2, "order": "layers", **options})
    with pytest.raises(ValueError, match=match):
        step(zerojax.shard_train_state(state, 3, mesh=make_mesh()), jnp.ones((ROWS, 64)))


def test_losses_without_a_loop_over_layers_are_refused():
    match = r"the loss has no scan over stacked parameters\. Stack the layers \(jax\.lax\.scan"
    refused(lambda p, x: jnp.mean(x @ p["w"][0]), match)
    steps = lambda p, x: jax.lax.scan(lambda x, _: (x @ p["w"][0], None), x, None, length=2)
    refused(lambda p, x: jnp.mean(steps(p, x)[0]), match)


def test_loops_where_microbatches_cannot_run_side_by_side_are_refused():
    def layers(p, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0]

    def custom(p, x):
        run = jax.custom_vjp(layers)
        run.defvjp(lambda p, x: (layers(p, x), p), lambda p, g: (p, g))
        return jnp.mean(run(p, x))

    match = r"inside {}, whose microbatches cannot.*Take the scan out.*order='microbatches'"
    choice = lambda p, x: jnp.mean(jax.lax.cond(x.sum() > 0, layers, lambda _, x: x, p, x))
    refused(choice, match.format("cond"))
    refused(custom, match.format(r"custom_vjp_call\w*"))


def test_an_order_that_is_not_known():
    with pytest.raises(
        ValueError, match=r"order must be 'microbatches', 'layers' or 'auto', got 'turn'"
    ):
        zerojax.train_step(lambda p, b: 0.0, accumulate=2, order="turn")


# -- what reads `accumulate`


@pytest.mark.parametrize(
    ("name", "stage"),
    mostly_slow(
        itertools.product(("gpt, remat", "rich, remat"), (1, 3)),
        lambda *case: case == ("gpt, remat", 3),
    ),
)
def test_verify_knows_the_order(name, stage):
    model = MODELS[name]()
    state, _, step = run(model, "layers", optax.adam(1e-2), stage=stage, steps=1, prefetch=1)
    zerojax.verify(step, state, model.batch, model.rng, whole_batch=model.rng is None).check()


@pytest.mark.parametrize("stage", mostly_slow((1, 3), lambda stage: stage == 3))
def test_audit_knows_the_order(stage):
    model = gpt(remat=True)
    state, _, step = run(model, "layers", optax.adam(1e-2), stage=stage, steps=1, prefetch=1)
    assert zerojax.audit(step, state, model.batch).check().accumulate == 1


@pytest.mark.gpu_code
def test_steps_for_gpus_keep_the_contract_of_one_microbatch():
    """Every layer is gathered twice and reduced once, asynchronously, and added where it is made;
    a forecast says what it is of."""
    model = _presets.Gpt(4, 256, 4, vocab=512, tokens=64)
    made = {}
    for order in ("microbatches", "layers"):
        step = zerojax.train_step(model.loss, accumulate=4, order=order)
        options = {"gpus": "8xH100", "stages": 3, "precision": zerojax.Precision("bfloat16")}
        found = zerojax.forecast(step, model.make_state, model.batch(8 * 4 * 2), **options)
        (made[order],) = found.cases
        assert made[order].report.findings() == [] and made[order].accumulate == 4
    assert made["layers"].wire_bytes < 0.3 * made["microbatches"].wire_bytes
    assert "accumulate=4, order='layers'" in str(found)
    sums = r"add_fusion.* = f32\[(?:256,1024|1024,256|256,768)\]"
    assert not re.search(sums, made["layers"].report.module.text)
