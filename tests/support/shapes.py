"""Plans of shapes alone, and the spec of each leaf: tests of plans use them."""

import jax

import zerojax


def specs(plan):
    return {leaf.path: leaf.spec for leaf in plan.leaves}


def params_plan(params, stage=3, **options):
    return zerojax.plan({"params": params}, stage=stage, **options)


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)
