"""The kernel read and run by itself: its budget, its imports, and stages 0 to 3 without options."""

import ast
import functools
import re

import jax
import optax
import pytest

from tests import house
from tests.kernel import alone
from tests.support.processes import ROOT, output

SOURCES = house.sources()
MODULES = {name: text for name, text in SOURCES.items() if name.startswith("_kernel.")}
MODULES.pop("_kernel.__init__")


def code(names):
    return sum(len(house.code_lines(SOURCES[name])) for name in names)


def used_by_the_kernel(module):
    """The source of those definitions of a module that the kernel names, and that these name."""
    nodes = {}
    for node in ast.parse(SOURCES[module]).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        names = [getattr(target, "name", getattr(target, "id", None)) for target in targets]
        nodes |= {name: node for name in names if name}
    named = lambda text: nodes.keys() & set(re.findall(r"\w+", text))
    used, more = set(), named("".join(MODULES.values()))
    while more - used:
        used |= more
        more = named("".join(map(ast.unparse, {nodes[name] for name in used})))
    return "\n".join(ast.unparse(nodes[name]) for name in used)


def test_the_kernel_keeps_its_budget():
    assert [f"_kernel.{name}" for name in house.KERNEL] == sorted(
        MODULES, key=lambda name: house.KERNEL.index(name.partition(".")[2])
    )
    assert len(MODULES) <= 9 and code(MODULES) <= 1900
    beneath = sum(
        len(house.code_lines(text))
        for text in map(used_by_the_kernel, sorted(house.BENEATH_KERNEL))
    )
    assert code(MODULES) + beneath <= 2400


def test_the_kernel_imports_nothing_else_of_the_library():
    imports = house.imports(SOURCES)
    beneath = set().union(*(imports[name] for name in MODULES)) - MODULES.keys()
    assert beneath - {"_kernel.__init__", "__init__"} == house.BENEATH_KERNEL


@functools.cache
def losses_of_one_device():
    @jax.jit
    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(alone.loss)(params, x)
        updates, opt_state = alone.TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, losses = alone.make_params(), []
    opt_state = alone.TX.init(params)
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, alone.rows())
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def printed():
    """What training at stages 0 to 3 prints, in a process that imports nothing else."""
    lines = output(ROOT / "tests" / "kernel" / "alone.py", *range(4))[0].splitlines()
    each = [ast.literal_eval(line) for line in lines]
    return [each[at : at + 6] for at in range(0, len(each), 6)]


@pytest.mark.parametrize("stage", range(4))
def test_the_kernel_trains_by_itself(stage, printed):
    *losses, weight, moment, modules = printed[stage]
    assert losses == pytest.approx(losses_of_one_device(), rel=1e-5)
    assert weight == ((3, 4, 16) if stage == 3 else (3, 16, 16))
    assert moment == ((3, 4, 16) if stage else (3, 16, 16))
    allowed = {f"zerojax.{name}" for name in (*MODULES, *house.BENEATH_KERNEL, "_kernel")}
    assert set(modules) <= allowed | {"zerojax"}
