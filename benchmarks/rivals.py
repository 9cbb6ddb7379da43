"""What users would write otherwise: FSDP by sharding annotations on a plain jitted step."""

import functools

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zerojax

CONSTRAINED = ("weights", "blocks", "nothing")


def annotated_step(model, mesh, remat, constrain):
    """A jitted step, its abstract state and batch; `constrain` says what else is annotated.

    "weights": each layer's weights, in the scan, to be whole: the strongest hint there is.
    "blocks": each layer's activations, to be cut along the batch, as Flax models have them.
    "nothing": parameters and batch are sharded, and XLA figures out the rest: the guides' form.
    """
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh)
    held_to = lambda spec: functools.partial(
        jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, spec)
    )
    whole, rows = held_to(PartitionSpec()), held_to(PartitionSpec("data"))

    class Annotated(type(model)):
        def layer(self, x, p):
            if constrain == "weights":
                p = jax.tree.map(whole, p)
            if constrain == "nothing":
                return super().layer(x, p)
            x, _ = super().layer(rows(x), p)
            return rows(x), None

    annotated = Annotated(**vars(model))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        loss, grads = jax.value_and_grad(annotated.loss)(state.params, tokens, remat=remat)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        leaves, treedef = jax.tree.flatten(new)
        pairs = zip(leaves, plan.shardings, strict=True)
        return treedef.unflatten([jax.lax.with_sharding_constraint(*pair) for pair in pairs]), loss

    return step, plan


def compiled(family, model, mesh, remat, constrain, batch, options):
    step, plan = annotated_step(model, mesh, remat, constrain)
    lowered = step.lower(plan.abstract(), zerojax.aot.batch(batch, plan))
    return lowered.compile(compiler_options=options or None)
