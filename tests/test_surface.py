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
    "_compat", "_agreement", "_fingerprint", "_xla_options", "_processes", "_mesh", "_move",
    "_spec", "_state", "_refusals", "_fields",
    "_inline", "_update", "_linear", "_gather", "_table", "_pyplot", "_opt_specs", "_precision",
    "_plan_plot", "_plan", "_arguments", "_idle_axes",
    "_planner", "_mean", "_batch", "_views", "_steps", "_readers", "_split",
    "_vary", "_body", "_layers", "_prefetch", "_loops", "_engine", "_explicit", "_accumulate",
    "_constraints", "_trace", "_parameter", "_program", "_nans", "_grad", "_finite",
    "_module_state",
    "_step", "_place", "_nnx_state", "nnx", "_files", "_extras", "_matching", "_checkpoint",
    "_ranking", "_checkpoints", "_safetensors", "_replay", "_compare", "_reference",
    "_field_checks", "_causes", "_report",
    "_verify", "_gpus", "aot", "_compiler_log", "_instruction", "_hlo", "_groups", "_cost",
    "_schedule", "_lineage", "_liveness", "_memory_use", "_contract", "_timeline", "_audit_report",
    "_serves", "_audit", "_memory_table", "_flops", "_mfu", "_presets", "_progress",
    "_forecast_plot", "_forecast", "_doctor",
]  # fmt: skip


def modules():
    return [m.name for m in pkgutil.iter_modules([str(ROOT)]) if m.name != "__main__"]


def imports_of(tree):
    """Modules of the package that a module imports, but for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for inner in ast.walk(node):
                inner.names = []  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "zerojax":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("zerojax.") and node.names:
                yield node.module.removeprefix("zerojax.")


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
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        for imported in imports_of(tree):
            assert LAYERS.index(imported) < LAYERS.index(name), f"{name} imports {imported}"


def test_only_public_jax_is_imported():
    for name in modules():
        text = (ROOT / f"{name}.py").read_text()
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


COMPILE_FOR_GPUS = ("aot", "_forecast")


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
    assert fresh(code) == "['zerojax'] zerojax._checkpoint True"


def test_a_loop_needs_no_orbax_and_no_compiler_tools():
    code = (
        "import sys, zerojax; zerojax.train_step, zerojax.shard_train_state, zerojax.Plan; "
        "print('orbax' in sys.modules, 'zerojax._audit' in sys.modules)"
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
