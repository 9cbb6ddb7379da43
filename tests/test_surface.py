"""The package seen from outside: names, ranks, sizes, and what importing it costs."""

import ast
import collections
import doctest
import graphlib
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests import house

ROOT = pathlib.Path(zerojax.__file__).parent
PUBLIC = {
    "Checkpoints", "Experts", "ModuleState", "Offload", "Plan", "Precision", "QuantizedWire",
    "Schedule", "Sequences", "audit", "eval_step", "forecast", "gather_params", "initialize",
    "mean", "mesh", "pad_batch", "plan", "quantize", "reshard", "restore", "save", "shard_batch",
    "shard_train_state", "stream", "train_step", "unpad", "value_and_grad", "verify",
}  # fmt: skip
TOOLS = {
    "Meter", "Rates", "ReplayError", "Report", "Verification", "choose", "peak_flops", "rates_of",
    "replay", "step_flops", "study",
}  # fmt: skip
CHECKPOINT = {"Extras", "Preempted", "export_safetensors", "import_safetensors", "read_extras"}
MANUAL = {"by_matrix", "dequantize", "master_weights", "narrow_moments"}
RUN = {"Watchdog", "elastic", "log", "process_slice"}
NNX = {"ModelStep", "eval_step", "merge", "quantize", "shard", "state", "train_step", "update"}
AOT = {"batch", "mesh"}
KERAS = {"pure", "shard"}
SUBMODULES = {"aot", "checkpoint", "keras", "manual", "nnx", "run", "tools"}
MOST_NAMES = 65  # in all modules
MOST_AT_THE_TOP = 36  # with these modules
MODULES_OF_NAMES = {zerojax: PUBLIC, zerojax.tools: TOOLS}
MODULES_OF_NAMES |= {zerojax.checkpoint: CHECKPOINT, zerojax.run: RUN}
MODULES_OF_NAMES |= {zerojax.manual: MANUAL}
NAMED = {
    f"{module.__name__}.{name}".removeprefix("zerojax."): getattr(module, name)
    for module, names in MODULES_OF_NAMES.items()
    for name in names
}


OWNERS = {"device", "groups", "layout", "loss", "new", "plan", "search", "self", "state", "trial"}
MODULES = {name: text for name, text in house.sources().items() if "__init__" not in name}
MOST_LINES, LONGEST = 500, 60  # of a file, of a function


@pytest.mark.parametrize("module", MODULES_OF_NAMES)
def test_public_names(module):
    names = {name for name in dir(module) if not name.startswith("_")}
    own = {name for name in names if not inspect.ismodule(getattr(module, name))}
    assert own == MODULES_OF_NAMES[module]


def test_there_are_few_names_and_each_has_one_home():
    assert len(PUBLIC) + len(SUBMODULES) <= MOST_AT_THE_TOP
    assert len(NAMED) + len(NNX) + len(AOT) + len(KERAS) <= MOST_NAMES
    homes = collections.Counter(name for names in MODULES_OF_NAMES.values() for name in names)
    assert [name for name, count in homes.items() if count > 1] == []


@pytest.mark.parametrize(
    ("module", "names"), [(zerojax.nnx, NNX), (zerojax.aot, AOT), (zerojax.keras, KERAS)]
)
def test_names_of_a_module_that_defines_them(module, names):
    values = {name: v for name, v in vars(module).items() if name[0] != "_" and callable(v)}
    functions = {name for name, v in values.items() if v.__module__ == module.__name__}
    assert functions == names - {"state", "update"} and names <= values.keys()


def public(value):
    return {name for name in dir(value) if not name.startswith("_")}


def test_public_objects_show_what_users_call():
    assert len(public(zerojax.Plan)) <= 16
    plan = zerojax.plan(({"w": jnp.ones((8, 8))}, ()))
    said = inspect.getdoc(zerojax.Plan)
    assert [name for name in public(plan) if f"`{name}`" not in said] == []
    for step in (zerojax.train_step(len), zerojax.eval_step(len)):
        assert len(public(step) - public(jax.jit(len))) <= 9
    assert public(zerojax.QuantizedWire()) == {"block", "dtype"}
    assert public(zerojax.nnx.train_step(len)) == {"compile", "load", "pure", "save"}


def test_steps_take_few_arguments():
    assert len(inspect.signature(zerojax.train_step).parameters) <= 11
    assert len(inspect.signature(zerojax.nnx.train_step).parameters) <= 8


@pytest.mark.parametrize("package", [zerojax, zerojax.tools])
def test_names_are_imported_from_where_type_checkers_see_them(package):
    tree = ast.parse(pathlib.Path(package.__file__).read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    names = {a.asname: n.module for n in seen.body for a in n.names}  # type: ignore
    own = f"{package.__name__}."
    modules = {name: own + module for name, module in package._MODULES.items()}
    submodules = SUBMODULES & names.keys()
    assert names == modules | dict.fromkeys(submodules, "zerojax")


def test_imports_point_down():
    assert {house.package_of(name) for name in MODULES} == house.RANK.keys()
    assert sum(map(len, house.imports(MODULES).values())) > 2 * len(MODULES)
    assert house.upward(MODULES) == []


def test_what_a_step_does_depends_on_no_tool():
    """Nor on a table of GPUs, which is one."""
    above = ("tools.", "aot", "__main__")
    imports = house.imports(house.sources())
    core = {name: found for name, found in imports.items() if not name.startswith(above)}
    users = {name for name, found in core.items() if any(one.startswith("tools") for one in found)}
    assert users == {"__init__"} and len(core) > 70


def test_the_list_of_files_says_what_each_is():
    listed = dict(house.files(MODULES))
    assert {f"zerojax/{name.replace('.', '/')}.py" for name in MODULES} == listed.keys()
    assert all(len(sentence) > 10 for sentence in listed.values())
    kernel = [path for path in listed if path.startswith("zerojax/_kernel/")]
    assert kernel == [f"zerojax/_kernel/{name}.py" for name in house.KERNEL]


def test_no_imports_go_in_a_circle():
    order = graphlib.TopologicalSorter(house.imports(MODULES))
    assert len(list(order.static_order())) == len(MODULES)  # CycleError names a circle


def test_no_file_is_crowded():
    lines = {name: len(text.splitlines()) for name, text in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_functions_are_short_and_typed():
    found = {name: house.measured(text) for name, text in MODULES.items()}
    longest = {name: max(lengths, default=0) for name, (_, lengths) in found.items()}
    assert {name: length for name, length in longest.items() if length > LONGEST} == {}
    counts = sum((counts for counts, _ in found.values()), collections.Counter())
    assert counts["Any"] <= 200


@pytest.mark.parametrize("packages", [("_kernel",), ("_step", "_features")])
def test_the_hardest_packages_say_why(packages):
    found = [house.measured(text)[0] for name, text in MODULES.items() if name.startswith(packages)]
    counts = sum(found, collections.Counter())
    assert counts["comments"] + counts["trailing"] >= 0.04 * counts["lines"]


def test_no_name_is_taken_twice():
    """Of classes, modules and constants; single letters stand for types."""
    names = []
    for module, text in MODULES.items():
        tree = ast.parse(text)
        assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [n for one in assigned for n in ast.walk(one) if isinstance(n, ast.Name)]
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        own |= {n.id for n in targets if isinstance(n.ctx, ast.Store) and not n.id.islower()}
        names += [module.rpartition(".")[2].strip("_"), *(each.lstrip("_") for each in own)]
    twice = {name for name, count in collections.Counter(names).items() if count > 1 < len(name)}
    assert len(names) > 400 and not twice


def test_one_module_reads_the_parameters_of_equations():
    """Besides `_compat`. Those in `OWNERS` have other `params`."""
    read = []
    for name, text in MODULES.items():
        nodes = ast.walk(ast.parse(text if name not in ("_jaxprs", "_compat") else ""))
        params = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "params")
        owners = (ast.unparse(node.value) for node in params)
        read += [f"{name}: {each}" for each in owners if each.rpartition(".")[2] not in OWNERS]
    assert read == []


def test_the_words_of_errors_are_in_one_module():
    reader = re.compile(r"in str\(error|re\.\w+\(.*str\(error")
    assert [name for name, text in MODULES.items() if reader.search(text)] == ["_compat"]


def test_only_public_jax_is_imported():
    for name, text in MODULES.items():
        assert "jax._src" not in text, name
        assert "jax.interpreters" not in text or name == "_compat", name


@pytest.mark.parametrize("name", sorted(NAMED))
def test_public_names_are_documented(name):
    assert len(inspect.getdoc(NAMED[name]) or "") > 60


def test_public_names_are_in_the_reference():
    page = (ROOT.parent / "docs" / "reference.md").read_text()
    listed = re.findall(r"^- `zerojax\.([\w.]+)`: (.+\n(?:  .+\n)*)", page, flags=re.MULTILINE)
    said = {name: " ".join(text.split()) for name, text in listed}
    values = {**NAMED, "aot": zerojax.aot, "keras": zerojax.keras, "nnx": zerojax.nnx}
    firsts = {name: inspect.getdoc(value).split("\n\n")[0] for name, value in values.items()}
    assert said == {name: " ".join(text.split()) for name, text in firsts.items()}
    assert len(listed) == len(said)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_documented_arguments_exist(name):
    value = NAMED[name]
    section = re.search(r"Arguments:\n((?: {4}.*\n|\n)+)", (inspect.getdoc(value) or "") + "\n")
    if section:
        named = re.findall(r"^ {4}(\w[\w, ]*):", section[1], flags=re.MULTILINE)
        arguments = {one for names in named for one in names.split(", ")}
        assert arguments and arguments <= set(inspect.signature(value).parameters)


OPTIONS = {  # of the first function, those of the others too
    zerojax.plan: [zerojax.shard_train_state, zerojax.nnx.shard],
    zerojax.nnx.train_step: [zerojax.train_step],
}


@pytest.mark.parametrize("first", OPTIONS)
def test_an_option_is_taken_and_described_wherever_it_is_of_use(first):
    parameters = inspect.signature(first).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty}
    for other in OPTIONS[first]:
        theirs = inspect.signature(other).parameters
        for name in options.keys() - ({"tx"} if other is zerojax.nnx.shard else set()):
            assert theirs[name].default == options[name], (other, name)
            assert re.search(rf"^ {{4}}{name}: ", inspect.getdoc(other), re.M), (other, name)


# Never made by users.
RESULTS = {"checkpoint.Extras", "checkpoint.Preempted", "tools.Report"}
RESULTS |= {"tools.ReplayError", "tools.Verification"}


@pytest.mark.parametrize("name", sorted(NAMED.keys() - RESULTS))
def test_what_is_called_has_an_example(name):
    assert ">>> " in (inspect.getdoc(NAMED[name]) or "")


@pytest.mark.parametrize("module", [zerojax.nnx, zerojax.aot])
def test_what_is_called_in_modules_has_an_example(module):
    called = [f for f in vars(module).values() if inspect.isfunction(f)]
    named = [f for f in called if f.__module__ == module.__name__ and f.__name__[0] != "_"]
    without = {f.__name__ for f in named if ">>> " not in (inspect.getdoc(f) or "")}
    assert len(named) >= 2 and not without


def examples_run(names):
    """Runs the docstring examples of these modules, and returns how many there are."""
    scope = {"zerojax": zerojax, "jax": jax, "jnp": jnp, "np": np, "optax": optax,
             "TrainState": TrainState}  # fmt: skip
    attempted = 0
    for name in names:
        module = importlib.import_module(f"zerojax.{name}")
        runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
        examples = finder.find(module, extraglobs=scope)
        for name, value in vars(module).items():  # doctest passes by functions with a wrapper
            is_its_own = getattr(value, "__module__", "") == module.__name__
            if is_its_own and hasattr(value, "options"):
                examples += finder.find(value, name, module, extraglobs=scope)
        for example in examples:
            assert runner.run(example).failed == 0, example.name
        attempted += runner.tries
    return attempted


COMPILE_FOR_GPUS = (
    "aot",
    "tools._forecast.choose",
    "tools._forecast.forecast",
    "tools._forecast.study",
)


@pytest.mark.ci
def test_docstring_examples_run():
    assert examples_run([n for n in MODULES if n not in COMPILE_FOR_GPUS]) >= 10


@pytest.mark.gpu_code
def test_docstring_examples_for_gpus_run():
    assert examples_run(COMPILE_FOR_GPUS) >= 4


def fresh(code):
    """Returns what a new Python prints."""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.strip()


def test_importing_costs_next_to_nothing_beside_jax_flax_and_optax():
    """Time is noise on a busy machine; what is imported is not."""
    code = (
        "import sys, jax, flax, optax; before = set(sys.modules); import zerojax; "
        "print(sorted(set(sys.modules) - before), zerojax.save.__module__, 'orbax' in sys.modules)"
    )
    assert fresh(code) == "['zerojax'] zerojax._checkpoint.save True"


def test_a_loop_needs_no_orbax_and_no_compiler_tools():
    code = (
        "import sys, zerojax; zerojax.train_step, zerojax.shard_train_state, zerojax.Plan; "
        "print('orbax' in sys.modules, 'zerojax.tools._audit.audit' in sys.modules)"
    )
    assert fresh(code) == "False False"


def test_a_session_that_still_has_an_old_jax_is_named():
    code = (
        "import sys, types; sys.modules['jax'] = types.SimpleNamespace(**"
        "{'__version__': '0.7.2', '__version_info__': (0, 7, 2)})\n"
        "try:\n    import zerojax\nexcept ImportError as error:\n    print(error)"
    )
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    (oldest,) = (x.removeprefix("jax>=") for x in project["dependencies"] if x.startswith("jax>="))
    assert fresh(code) == (
        f"zerojax needs JAX {oldest} or newer, and 0.7.2 is in memory. Upgrade it, and "
        "restart the process: in a notebook, its session."
    )


def test_nothing_but_runtime_dependencies_is_imported():
    code = (
        "import sys, zerojax; [getattr(zerojax, name) for name in dir(zerojax)]; "
        "print([m for m in ('matplotlib', 'tqdm', 'pandas', 'torch') if m in sys.modules])"
    )
    assert fresh(code) == "[]"


@pytest.mark.parametrize(
    ("module", "name"),
    [(zerojax, "quantized"), (zerojax.tools, "audit"), (zerojax.run, "mesh")],
)
def test_unknown_names_are_attribute_errors(module, name):
    said = f"module '{module.__name__}' has no attribute '{name}'"
    with pytest.raises(AttributeError, match=said):
        getattr(module, name)
