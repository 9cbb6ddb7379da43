"""The package as others see it: names, layers, sizes, what importing it costs."""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

ROOT = pathlib.Path(zerojax.__file__).parent
PUBLIC = {
    "Checkpoints", "Extras", "LeafPlan", "ModuleState", "Plan", "Precision", "Preempted", "Rates",
    "Report", "Verification", "Watchdog", "audit", "eval_step", "export_safetensors", "forecast",
    "gather", "gather_params", "import_safetensors", "initialize", "log", "master_weights", "mean",
    "memory_table", "param_specs", "peak_flops", "plan", "process_slice", "read_extras", "restore",
    "save", "scan", "shard_batch", "shard_train_state", "shards", "step_flops", "train_step",
    "value_and_grad", "verify",
}  # fmt: skip

# Each module may import those to its left.
LAYERS = [
    "_compat", "_agreement", "_fingerprint", "_engine.xla_options", "_processes",
    "_plan.mesh", "_plan.move", "_plan.spec", "_state.state", "_state.refusals",
    "_loss.fields", "_jaxpr", "_plan.update", "_step.linear", "_collectives", "_text",
    "_figures", "_plan.optimizer", "_plan.precision", "_plan.show", "_plan.plan",
    "_loss.arguments", "_step.idle_axes", "_plan.planner", "_loss.mean", "_loss.batch",
    "_engine.views", "_engine.ir", "_engine.readers", "_engine.split", "_engine.vary",
    "_engine.body", "_engine.layers", "_engine.prefetch", "_engine.loops", "_engine.run",
    "_step.explicit", "_step.accumulate", "_loss.constraints", "_loss.trace",
    "_step.parameter", "_step.program", "_loss.nans", "_step.grad", "_step.finite",
    "_state.module_state", "_step.step", "_plan.place", "_state.nnx_state", "nnx",
    "_checkpoint.files", "_checkpoint.extras", "_checkpoint.matching",
    "_checkpoint.checkpoint", "_checkpoint.ranking", "_checkpoint.loop",
    "_checkpoint.safetensors", "_verify.replay", "_verify.compare", "_verify.reference",
    "_verify.field_checks", "_verify.causes", "_verify.verification", "_verify.verify",
    "_hlo.gpus", "aot", "_audit.compiler_log", "_hlo.instruction", "_hlo.module",
    "_hlo.groups", "_hlo.cost", "_hlo.schedule", "_hlo.lineage", "_hlo.liveness",
    "_audit.memory", "_audit.contract", "_audit.timeline", "_audit.report", "_audit.traffic",
    "_audit.audit", "_forecast.memory_table", "_forecast.flops", "_forecast.mfu",
    "_forecast.presets", "_forecast.progress", "_forecast.plot", "_forecast.forecast",
    "_forecast.doctor",
]  # fmt: skip


def modules():
    found = pkgutil.walk_packages([str(ROOT)], "zerojax.")
    names = [m.name.removeprefix("zerojax.") for m in found if not m.ispkg]
    return [name for name in names if name != "__main__"]


def source(name):
    return (ROOT / f"{name.replace('.', '/')}.py").read_text()


def imports_of(tree):
    """Modules of the package that a module imports, but for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for inner in ast.walk(node):
                inner.names = []  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("zerojax").removeprefix(".")
            if node.module != "zerojax" and not node.module.startswith("zerojax."):
                continue
            if module in LAYERS and node.names:
                yield module
            elif module not in LAYERS:  # a package
                yield from (f"{module}.{alias.name}".removeprefix(".") for alias in node.names)


def test_public_names():
    public = {
        n
        for n in dir(zerojax)
        if not n.startswith("_") and not inspect.ismodule(getattr(zerojax, n))
    }
    assert public == PUBLIC


def test_names_are_imported_from_where_type_checkers_see_them():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    names = {a.asname: n.module for n in seen.body for a in n.names}  # type: ignore
    whole = {"aot": "zerojax", "nnx": "zerojax"}  # modules
    modules = {name: f"zerojax.{module}" for name, module in zerojax._MODULES.items()}
    assert names == modules | whole


def test_imports_point_one_way():
    assert sorted(modules()) == sorted(LAYERS)
    for name in modules():
        tree = ast.parse(source(name))
        for imported in imports_of(tree):
            assert LAYERS.index(imported) < LAYERS.index(name), f"{name} imports {imported}"


def test_only_public_jax_is_imported():
    for name in modules():
        text = source(name)
        assert "jax._src" not in text, name
        assert "jax.interpreters" not in text or name == "_compat", name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_documented(name):
    assert len(inspect.getdoc(getattr(zerojax, name)) or "") > 60


def test_public_names_are_in_the_reference():
    page = (ROOT.parent / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: zerojax\.(\w+)$", page, flags=re.MULTILINE)
    assert set(listed) == PUBLIC | {"aot", "nnx"} and len(listed) == len(set(listed))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_documented_arguments_exist(name):
    value = getattr(zerojax, name)
    section = re.search(r"Arguments:\n((?: {4}.*\n|\n)+)", (inspect.getdoc(value) or "") + "\n")
    if section:
        named = re.findall(r"^ {4}(\w[\w, ]*):", section[1], flags=re.MULTILINE)
        arguments = {one for names in named for one in names.split(", ")}
        assert arguments and arguments <= set(inspect.signature(value).parameters)


RESULTS = {"Extras", "LeafPlan", "Preempted", "Report", "Verification"}  # never made by users


@pytest.mark.parametrize("name", sorted(PUBLIC - RESULTS))
def test_what_is_called_has_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(zerojax, name)) or "")


@pytest.mark.parametrize("module", [zerojax.nnx, zerojax.aot])
def test_what_is_called_in_modules_has_an_example(module):
    called = [f for f in vars(module).values() if inspect.isfunction(f)]
    named = [f for f in called if f.__module__ == module.__name__ and f.__name__[0] != "_"]
    without = {f.__name__ for f in named if ">>> " not in (inspect.getdoc(f) or "")}
    assert len(named) >= 3 and not without


def examples_run(names):
    """How many docstring examples these modules have, all of them right."""
    scope = {"zerojax": zerojax, "jax": jax, "jnp": jnp, "np": np, "optax": optax,
             "TrainState": TrainState}  # fmt: skip
    attempted = 0
    for name in names:
        module = importlib.import_module(f"zerojax.{name}")
        result = doctest.testmod(module, extraglobs=scope)
        assert result.failed == 0, name
        attempted += result.attempted
    return attempted


COMPILE_FOR_GPUS = ("aot", "_forecast.forecast")


def test_docstring_examples_run():
    assert examples_run([n for n in modules() if n not in COMPILE_FOR_GPUS]) >= 10


@pytest.mark.gpu_code
def test_docstring_examples_for_gpus_run():
    assert examples_run(COMPILE_FOR_GPUS) >= 2


def fresh(code):
    """What a new Python prints."""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.strip()


def test_importing_costs_next_to_nothing_beside_jax_flax_and_optax():
    """Time is noise on a busy machine; what is imported is not."""
    code = (
        "import sys, jax, flax, optax; before = set(sys.modules); import zerojax; "
        "print(sorted(set(sys.modules) - before), zerojax.save.__module__, 'orbax' in sys.modules)"
    )
    assert fresh(code) == "['zerojax'] zerojax._checkpoint.checkpoint True"


def test_a_loop_needs_no_orbax_and_no_compiler_tools():
    code = (
        "import sys, zerojax; zerojax.train_step, zerojax.shard_train_state, zerojax.Plan; "
        "print('orbax' in sys.modules, 'zerojax._audit.audit' in sys.modules)"
    )
    assert fresh(code) == "False False"


def test_nothing_but_runtime_dependencies_is_imported():
    code = (
        "import sys, zerojax; [getattr(zerojax, name) for name in dir(zerojax)]; "
        "print([m for m in ('matplotlib', 'tqdm', 'pandas', 'torch') if m in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'zerojax' has no attribute 'shard'"):
        zerojax.shard  # noqa: B018
