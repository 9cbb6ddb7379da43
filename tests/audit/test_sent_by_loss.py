"""What a loss sends itself: a report names and counts it, and it breaks no contract, which is as
strict as before about weights and gradients."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from tests.audit.test_contract import broken
from zerojax.tools._hlo.timeline import Sent

AXES = ("data", "seq")
TOKENS, DIM = 64, 32
KIB = TOKENS * DIM * 4 / 1024  # of a device's activations
RING = [(i, (i + 1) % 4) for i in range(4)]


def planned(stage, mesh=None, groups=None):
    params = {
        "w": jnp.ones((DIM, DIM)),
        "scale": jnp.ones(DIM),
        "place": jnp.ones((4 * TOKENS, DIM)),
        "layers": jnp.ones((3, DIM, DIM)),
    }
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    mesh = mesh or zerojax.mesh(data=2, seq=4)
    return zerojax.plan(make, stage=stage, mesh=mesh, axis=AXES, groups=groups)


def audited(plan, mix, step=zerojax.train_step, rows=8, **options):
    """The audit of a step that mixes tokens between two uses of a weight."""

    def loss(params, x):
        return jnp.mean(mix(params, x @ params["w"]) @ params["w"]) ** 2

    x = zerojax.aot.batch(jnp.ones((rows, TOKENS, DIM)), plan)
    return zerojax.audit(step(loss, **options), plan.abstract(), x)


def everything(params, x):
    """Asks for each kind of collective once, by name, for activations of parameters."""
    x = x + lax.all_to_all(x * params["scale"], "seq", 1, 1, tiled=True)
    x = jnp.sin(x) * lax.ppermute(jnp.cos(x), "seq", RING)
    x = x / lax.pmax(lax.stop_gradient(jnp.abs(x)), "seq")
    x = jnp.tanh(lax.psum(x * params["scale"], "seq"))
    x = x + lax.all_gather(jnp.sin(x), "seq", axis=1, tiled=True).mean(1, keepdims=True)
    return x * lax.psum_scatter(jnp.tile(x, (1, 4, 1)), "seq", scatter_dimension=1, tiled=True)


# Of four devices, in activations of one. Backward transposes all but pmax.
SENT = {"all-gather": 3, "reduce-scatter": 3, "all-to-all": 0.75, "collective-permute": 1}
FORWARD = SENT | {"all-reduce": 2 * 1.5}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("step", [zerojax.train_step, zerojax.eval_step])
def test_each_collective_that_a_loss_names_is_its_own(step, stage):
    report = audited(planned(stage), everything, step)
    trains = step is zerojax.train_step
    sent = {kind: times * (1 + trains) for kind, times in FORWARD.items()}
    sent["all-reduce"] -= 1.5 * trains
    by_kind = dict.fromkeys(sent, 0.0)
    for one in (one for one in report.traffic if one.sends):
        by_kind[one.kind] += one.total_bytes / 1024 / KIB
        assert one.sends == {"the loss": 1} and one.axes == ("seq",)
        assert re.fullmatch(r"the loss: .*/test_sent_by_loss.py:\d+", one.serves)
    assert by_kind == pytest.approx(sent) and report.findings() == []
    nbytes = sum(sent.values()) * KIB * 1024
    assert report.loss_totals == report.to_dict()["wire_bytes_of_loss"] == {"the loss": nbytes}
    assert f"of that, sent by   the loss {nbytes / 1024:.1f} KiB\n" in str(report)


def test_what_it_only_moves_of_a_weight_is_no_gather_of_the_weight():
    """At stage 1 a weight is gathered once, after the update."""

    def places(params, x):
        here = lax.dynamic_slice_in_dim(params["place"], lax.axis_index("seq") * TOKENS, TOKENS)
        return x + here + lax.all_gather(here, "seq", tiled=True).mean(0)

    report = audited(planned(1), places).check()
    assert set(report.loss_totals) == {"the loss"}
    (gather,) = [one for one in report.traffic if one.kind == "all-gather" and one.sends]
    assert gather.paths == ("params/place",) and gather.serves.startswith("the loss: ")


def keys(params, x):
    with jax.named_scope("sequences/keys or values"):
        k = lax.all_gather(jnp.sin(x), "seq", axis=1, tiled=True)
    with jax.named_scope("sequences/halo"):
        x = x + lax.ppermute(x, "seq", RING)
    return x * k.mean(1, keepdims=True)


def test_sequences_are_listed_by_what_travels():
    """In a loop over checkpoints, which gathers again in backward."""
    loop = lambda p, x: lax.scan(lambda x, _: (jax.checkpoint(keys)(p, x), None), x, length=3)[0]
    report = audited(planned(3), loop).check()
    of = {"sequences/keys or values": 3 * (3 + 3 + 3), "sequences/halo": 3 * 3}
    assert report.loss_totals == {what: times * KIB * 1024 for what, times in of.items()}
    line = "of that, sent by   sequences/keys or values 216.0 KiB, sequences/halo 72.0 KiB"
    assert line in str(report).splitlines()
    assert re.search(r" 3 .* seq .* sequences/halo: .*/test_sent_by_loss.py:\d+", str(report))
    # They are activations: their sums are no gradients, though as large.
    assert report.memory.gradients < KIB * 1024 < report.memory.activations


def attends(params, x):
    x = x @ params["w"]
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x))
    return jnp.mean(jnp.einsum("bts,bsd->btd", scores, x) ** 2)


def test_a_loss_of_whole_sequences_has_the_lines_that_need_other_tokens():
    make = lambda: TrainState.create(
        apply_fn=None, params={"w": jnp.ones((DIM, DIM))}, tx=optax.sgd(0.1)
    )
    axis = zerojax.Sequences("seq", most_gathered=10)
    plan = zerojax.plan(make, mesh=zerojax.mesh(data=2, seq=4), sequence=axis)
    x = zerojax.aot.batch(jnp.ones((8, 4 * TOKENS, DIM)), plan)
    report = zerojax.audit(zerojax.train_step(attends), plan.abstract(), x).check()
    first = attends.__code__.co_firstlineno
    sent = [one for one in report.traffic if one.axes == ("seq",) and one.wire_bytes > 64]
    assert {one.source for one in sent} == {f"{__file__}:{first + n}" for n in (2, 3)}
    assert all(one.serves.startswith("sequences/") for one in sent)


@pytest.mark.gpu_code
def test_what_xla_joins_with_weights_is_counted_by_its_share():
    """Weights that are sharded over the axis of sequences travel with the keys."""
    mesh = zerojax.aot.mesh("8xH100", (2, 4), AXES)
    plan = planned(3, mesh=mesh, groups=dict.fromkeys(("params", "grads", "opt_state"), "seq"))
    layer = jax.checkpoint(lambda x, w: (keys(None, x) @ w, None))
    report = audited(plan, lambda p, x: lax.scan(layer, x, p["layers"])[0]).check()
    joined = [one for one in report.traffic if one.paths and one.sends]
    assert "all-gather" in {one.kind for one in joined}
    for one in joined:
        nbytes = sum(part.nbytes for part in one.parts if not part.paths)
        share = nbytes / sum(part.nbytes for part in one.parts)
        assert one.sends == {"sequences/keys or values": pytest.approx(share)} and 0 < share < 1
        assert one.serves == "sequences/keys or values: params/layers"
    of = {"sequences/keys or values": 3 * (3 + 3 + 3), "sequences/halo": 3 * 3}
    assert report.loss_totals == pytest.approx({k: n * KIB * 1024 for k, n in of.items()})


# -- as strict as before


@pytest.mark.parametrize("mix", [everything, keys])
def test_weights_and_gradients_are_held_to_the_contract_beside_it(mix):
    plan = planned(3)
    report = audited(plan, mix, rows=16, accumulate=2)
    assert report.findings() == []
    again = dataclasses.replace(report, accumulate=1)
    assert broken(again, "params/w is gathered 3 times a step; stage 3 promises at most 2")

    def changed(**fields):
        def change(one: Sent) -> Sent:
            serves = one.kind == "reduce-scatter" and one.paths == ("params/w",)
            return dataclasses.replace(one, **fields) if serves else one

        return dataclasses.replace(report, traffic=[*map(change, report.traffic)])

    line = broken(changed(kind="all-reduce"), "^all-reduce .* sums the full gradient of params/w ")
    assert "stage 3 promises a reduce-scatter" in line
    only = [one for one in report.traffic if one.sends or one.kind == "all-gather"]
    unreduced = dataclasses.replace(report, traffic=only)
    broken(unreduced, "no collective reduces the gradient of params/")


def test_a_step_by_hand_may_not_reduce_gradients_in_its_loss():
    """JAX itself sums those of weights that all devices have, in the scope of the loss."""
    plan = planned(1)

    def loss(params, x):
        with jax.named_scope("sequences/sum"):
            x = lax.psum(jnp.tanh(x @ params["w"]), "seq")
        return lax.pmean(jnp.mean(x**2), "data")

    def step(state, x):
        specs = {"in_specs": (jax.P(), jax.P(AXES)), "out_specs": jax.P()}
        grad = jax.shard_map(jax.grad(loss), mesh=plan.mesh, **specs)
        grads = lax.optimization_barrier(grad(state.params, x))
        return plan.constrain(state.apply_gradients(grads=grads))

    x = zerojax.aot.batch(jnp.ones((8, TOKENS, DIM)), plan)
    report = zerojax.audit(jax.jit(step, donate_argnums=0), plan.abstract(), x, plan=plan)
    broken(report, "all-reduce .* sums the full gradient of params/w .*a reduce-scatter")
