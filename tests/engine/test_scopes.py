"""Programs for GPUs name the parameters of collectives and the user's scopes of matmuls."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.support.reference import train_state


def scoped_loss(params, tokens):
    """A loop over layers, then two layers in Python, each of them in name scopes of the user's."""

    def layer(x, p):
        with jax.named_scope("mlp"):
            with jax.named_scope("up"):
                hidden = jnp.tanh(x @ p["up"].astype(x.dtype))
            with jax.named_scope("down"):
                return x + hidden @ p["down"].astype(x.dtype), None

    x = params["embed"].astype(jnp.bfloat16)[tokens]
    with jax.named_scope("trunk"):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    for at in range(2):
        with jax.named_scope(f"top{at}"):
            x, _ = jax.checkpoint(layer)(x, params["top"][at])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"].astype(x.dtype)).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def scoped(gpu_code):
    """The instructions of that loss's step, and what each collective serves, on 8 H100s."""
    mlp = {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))}
    params = {"layers": jax.tree.map(lambda x: jnp.stack([x] * 4), mlp), "top": [mlp, mlp]}
    params |= {"embed": jnp.ones((512, 256)), "head": jnp.ones((256, 512))}
    state = train_state(params, optax.sgd(1.0))
    plan = zerojax.plan(state, stage=3, mesh=zerojax.aot.mesh("8xH100"))
    tokens = zerojax.aot.batch(jax.ShapeDtypeStruct((4096,), jnp.int32), plan)
    compiled = zerojax.train_step(scoped_loss).lower(plan.abstract(), tokens).compile()
    report = zerojax.audit(compiled, plan=plan)
    instructions = [i for c in report.module.computations.values() for i in c.values()]
    return instructions, report.traffic


def test_a_gpu_program_names_each_collectives_parameters(scoped):
    """Alike layers of a Python loop share one program, so their names have a star."""
    _, traffic = scoped
    serving = [one for one in traffic if one.paths]
    assert {one.kind for one in serving} == {"all-gather", "reduce-scatter"}
    for one in serving:
        for path in one.paths:
            *folder, name = re.sub(r"/top/\d", "/top/*", path).split("/")
            # Of combined collectives XLA joins the names, and writes what they share once:
            # params/layers/(up/all_gather:down/all_gather).
            assert "/".join(folder) in one.scope and re.search(rf"\b{name}\b", one.scope)
            assert one.scope.rstrip(")").endswith(one.kind.replace("-", "_"))


def test_a_gpu_program_names_the_scopes_of_matmuls(scoped):
    instructions, _ = scoped
    scopes = [i.op_name for i in instructions if "dot" in i.name and "gemm" in i.name]
    missing = [scope for scope in scopes if not re.search(r"mlp.*\b(up|down)\b|\bhead\b", scope)]
    assert not missing
    in_loop = [scope for scope in scopes if "/while/" in scope]
    assert len(in_loop) >= 6 and all("trunk" in scope for scope in in_loop)
    for scope in ("top0", "top1"):  # two matmuls forward, four backward
        assert sum(scope in one for one in scopes) >= 6
