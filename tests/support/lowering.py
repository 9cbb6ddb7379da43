"""The programs of a configuration as text, from shapes: `configurations.py` uses them."""

import functools
import re
from typing import Any

import jax
from flax import nnx

import zerojax
from tests.support import nnx_models
from tests.support.schedules import scheduled


def parts(row: Any) -> tuple:
    """Returns the loss of a row, its plan, and the arguments of a step, as shapes."""
    models = []

    def make() -> Any:
        state, model = row.state_and_model()
        models.append(model)
        return state, model.batch, model.rng

    state, batch, rng = jax.eval_shape(make)
    plan = zerojax.plan(state, **row.options(row.plan))
    return models[0].loss, plan, (plan.abstract(), batch, *([] if rng is None else [rng]))


def train(row: Any) -> str:
    loss, plan, arguments = parts(row)
    return program(
        zerojax.train_step(loss, **scheduled(row.options(row.step, plan))).trace(*arguments)
    )


def train_on_gpus(row: Any) -> str:
    """Which are not there; the step is compiled with options that suit its loops."""
    loss, plan, arguments = parts(row)
    step = zerojax.train_step(loss, **scheduled(row.options(row.step, plan)))
    return f"{program(step.trace(*arguments))}\noptions: {step._options_for(*arguments)}"


def compiled(row: Any) -> str:
    loss, plan, arguments = parts(row)
    step = zerojax.train_step(loss, **scheduled(row.options(row.step, plan)))
    return step.lower(*arguments).compile().as_text()


def evaluate(row: Any) -> str:
    loss, plan, arguments = parts(row)
    return program(zerojax.eval_step(loss, **row.options(row.step, plan)).trace(*arguments))


def grads(row: Any) -> str:
    """In a `jax.jit` of the user's own."""
    loss, plan, (state, *arguments) = parts(row)
    grad = jax.jit(zerojax.value_and_grad(loss, plan, **scheduled(row.options(row.step, plan))))
    return program(grad.trace(state.params, *arguments))


def born(row: Any) -> str:
    """What makes a state where its plan has it, and what shows it without padding."""
    _, plan, (state, *_) = parts(row)
    make = plan._born_sharded(lambda: row.state_and_model()[0])
    return program(make.trace()) + program(jax.jit(zerojax.unpad).trace(state))


def plan(row: Any) -> str:
    _, plan, _ = parts(row)
    return f"{plan!r}\n{plan}"


def with_nnx(name: str, row: Any) -> str:
    model_plan = zerojax.plan(lambda: zerojax.nnx.state(*row.nnx()), **row.options(row.plan))
    state, (model, optimizer) = model_plan.abstract(), nnx.eval_shape(row.nnx)
    zerojax.nnx.update(model, optimizer, state)
    optimizer.tx = state.tx
    step = getattr(zerojax.nnx, name)(nnx_models.loss_fn, **row.options(row.step))
    functional, *arguments = step.pure(model, optimizer, nnx_models.BATCH)
    return program(functional.trace(*arguments))


nnx_train = functools.partial(with_nnx, "train_step")
nnx_evaluate = functools.partial(with_nnx, "eval_step")


def program(traced: jax.stages.Traced) -> str:
    """Returns a module without names of Python functions, and the scopes of its operations.

    It is one for GPUs: for CPUs, copies to host memory are left out. No GPU is needed to lower it.
    """
    module = traced.lower(lowering_platforms=("cuda",))
    names = re.findall(r'loc\("([^"]*)/[^"]*"(?!:)', module.as_text(debug_info=True))  # of no file
    scopes = {re.sub(r"\bjit\([^()]*\)", "jit()", name) for name in names}
    return "\n".join([renumbered(module.as_text()), "scopes:", *sorted(scopes)])


def renumbered(text: str) -> str:
    """Returns a module whose private functions have numbers, in their order, for names.

    Each argument and result of its main function is on a line of its own.
    """
    names = re.findall(r'func\.func private @("[^"]*"|[\w.$-]+)', text)
    numbers = {name: f"@f{number}" for number, name in enumerate(names)}
    text = re.sub(r'@("[^"]*"|[\w.$-]+)', lambda at: numbers.get(at[1], at[0]), text)
    text = re.sub(r"func\.func public .*", lambda at: _by_argument(at[0]), text)
    return re.sub(r"\Amodule @\S+", "module", text)


def _by_argument(head: str) -> str:
    return re.sub(r", (?=%arg\d+: |tensor<[^>]*> \{jax\.result_info)", ",\n    ", head)
