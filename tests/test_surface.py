"""The package as others see it: names, layers, sizes, what importing it costs."""

import ast
import doctest
import graphlib
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

# Each package may import those of the lines above its own, and within itself without circles.
RANKS = [
    {"_agreement", "_collectives", "_compat", "_figures", "_fingerprint", "_jaxpr", "_processes",
     "_text", "_types"},
    {"_state", "_hlo"},
    {"_plan", "_engine"},
    {"_loss"},
    {"_step"},
    {"_checkpoint", "_audit", "aot"},
    {"_verify", "_forecast", "nnx"},
    {"__main__"},
]  # fmt: skip
MOST_FILES = 12  # in a folder


def modules():
    found = pkgutil.walk_packages([str(ROOT)], "zerojax.")
    return [m.name.removeprefix("zerojax.") for m in found if not m.ispkg]


def source(name):
    return (ROOT / f"{name.replace('.', '/')}.py").read_text()


def imports_of(name):
    """Modules of the package that one imports, be it in a function or for type checking only."""
    every = set(modules())
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerojax":
            module = (node.module or "").removeprefix("zerojax").removeprefix(".")
            names = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names}
            yield from every & ({module} | names)


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


def test_imports_point_down():
    rank = {package: number for number, packages in enumerate(RANKS) for package in packages}
    assert {name.split(".")[0] for name in modules()} == rank.keys()
    for name in modules():
        package = name.split(".")[0]
        for imported in imports_of(name):
            other = imported.split(".")[0]
            below = rank[other] < rank[package] or (other == package and package != name)
            ground = rank[other] == rank[package] == 0
            assert below or ground, f"{name} imports {imported}"


def test_no_imports_go_in_a_circle():
    order = graphlib.TopologicalSorter({name: set(imports_of(name)) for name in modules()})
    assert len(list(order.static_order())) == len(modules())  # CycleError names a circle


def test_no_folder_is_crowded():
    for folder in [ROOT, *(path for path in ROOT.iterdir() if path.is_dir())]:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, folder


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
