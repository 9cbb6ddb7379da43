"""Tensors that others named and laid out: each goes where `names=` says, and back."""

import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import assert_equal_bits
from zerojax.checkpoint import export_safetensors, import_safetensors

ROOT = pathlib.Path(__file__).parents[2]
LAYERS, HEADS, DIM, IN = 3, 2, 4, 16


def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def theirs():
    """Files as torch has them: a layer at a time, q and k in one tensor, kernels transposed."""
    made = {}
    for n in range(LAYERS):
        made[f"m.{n}.qk.weight"] = numbers(2 * HEADS * DIM, IN) + n
        made[f"m.{n}.qk.bias"] = numbers(2 * HEADS * DIM) + n
        made[f"m.{n}.up.weight"] = numbers(40, IN) + n
    return made | {"wte": numbers(24, IN), "cls": numbers(1, 1, IN), "other.w": numbers(16, 8)}


NAMES = {
    "embed": "wte",
    "cls": ("cls", "1 1 out -> out"),
    "layers/q/kernel": ("m.{}.qk.weight", "(0/2 heads dim) in -> in heads dim"),
    "layers/k/kernel": ("m.{}.qk.weight", "(1/2 heads dim) in -> in heads dim"),
    "layers/q/bias": ("m.{}.qk.bias", "(0/2 heads dim) -> heads dim"),
    "layers/k/bias": ("m.{}.qk.bias", "(1/2 heads dim) -> heads dim"),
    "up_{}": ("m.{}.up.weight", "out in -> in out"),
}


def ours(files):
    stack = lambda name: np.stack([files[f"m.{n}.{name}"] for n in range(LAYERS)])
    kernel = stack("qk.weight").reshape(LAYERS, 2, HEADS, DIM, IN).transpose(1, 0, 4, 2, 3)
    bias = stack("qk.bias").reshape(LAYERS, 2, HEADS, DIM).transpose(1, 0, 2, 3)
    layers = {name: {"kernel": kernel[i], "bias": bias[i]} for i, name in enumerate("qk")}
    up = {f"up_{n}": files[f"m.{n}.up.weight"].T for n in range(LAYERS)}
    rest = {"embed": files["wte"], "cls": files["cls"][0, 0], "other": {"w": files["other.w"]}}
    return {"layers": layers, **up, **rest}


def saved(tmp_path, files=None):
    safetensors.numpy.save_file(files or theirs(), tmp_path / "model.safetensors")
    return tmp_path


def exported(path, params, names, **options):
    """The tensors of a new export."""
    export_safetensors(path, params, names=names, **options)
    (file,) = path.glob("*.safetensors")
    return safetensors.numpy.load_file(file)


def stage3(tree, devices):
    state = {"params": tree}
    return zerojax.plan(state, mesh=make_mesh(devices), min_shard_size=1, stacked="^layers")


def test_each_value_goes_where_it_belongs_and_back(tmp_path):
    """Into shards of devices that do not divide it, which are padded."""
    want, plan = ours(theirs()), stage3(ours(theirs()), 3)
    params = import_safetensors(saved(tmp_path), plan, names=NAMES)
    assert_equal_bits(zerojax.unpad({"params": params}, plan)["params"], want)
    for value, leaf in zip(jax.tree.leaves(params), plan.params, strict=True):
        assert value.sharding.is_equivalent_to(leaf.rest.sharding(plan.mesh), value.ndim)
    assert any(leaf.rest.padding for leaf in plan.params)
    for target, given, options in (("a", params, {"plan": plan}), ("b", want, {})):
        found = exported(tmp_path / target, given, NAMES, **options)
        assert found.keys() == theirs().keys()
        assert_equal_bits(found, theirs())


def test_a_layer_at_a_time_is_on_the_host(tmp_path):
    """Of a stack of eight, to write it; to read it, the parts of the devices."""
    names = {"layers": ("m.{}.w", "out in -> in out")}
    layers = numbers(8, 256, 256)
    plan = stage3({"layers": layers}, 8)
    params = plan.place({"params": {"layers": layers}})["params"]
    export_safetensors(tmp_path / "first", params, names=names)  # compiled
    tracemalloc.start()
    export_safetensors(tmp_path / "w", params, names=names)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 3.5 * layers[0].nbytes
    assert_equal_bits(import_safetensors(tmp_path / "w", plan, names=names), params)


def laid(layout):
    return {"embed": ("wte", layout)}


MISTAKES = [
    ({"embedd": "wte"}, "'embedd', which is not a parameter. Paths are such as cls, embed"),
    ({"layers/q/kernel": "m.{}.{}.{}.{}.{}"}, r"each \{\} there must count.* is \[3, 16, 2, 4\]"),
    ({"layers/q/bias": ("m.{}.qk.bias", "d -> d")}, "1 axes.*, 1 count layers. Name each"),
    ({"cls": "wte"}, "wte would consist of embed, cls, which do not cover it"),
    ({"up_0": "first"}, r"up_0 twice, as 'up_\{\}' and as 'up_0'. Leave one out"),
    (laid("a b c -> a b c"), r"embed 3 axes, in 'a b c -> a b c', but it is \[24,"),
    (laid("a b -> b a"), r"wte is \[24, 16\] in the.*should be \[16, 24\].*Pass like="),
    (laid("a b"), "layout 'a b' for embed. Name each axis once on each side of ->"),
    (laid("a b -> (a b)"), "on the right write only names"),
    (laid("2 a b -> a b"), "with a 1, or with one of several"),
    (laid("(2/2 a) b -> a b"), r"one of several parts, as in '\(0/3 out\)'"),
    (laid("((a) b) -> a b"), "in brackets"),
]


def test_a_mistake_in_the_names_is_an_error(tmp_path):
    saved(tmp_path)
    for change, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            import_safetensors(tmp_path, ours(theirs()), names=NAMES | change)


FLOAT8 = jnp.ones((2, 4), "float8_e4m3fn")
HALVES = {name: ("t", f"({n}/2 out) in -> out in") for n, name in enumerate("kq")}
# Halves of columns and halves of rows overlap, and leave a corner to nobody.
CORNERS = {"k": ("t", "(0/2 out) in -> out in"), "q": ("t", "out (1/2 in) -> out in")}
ONE = np.ones((24, IN), np.float32)


REFUSED = [
    ({"e": ONE}, {0: "wte"}, "has 0: 'wte'. Map paths to tensors"),
    ({"e": ONE}, {"e": None}, "has 'e': None. Map.*pair of its name and a layout"),
    ({"e": ONE}, {"e": "h.{n}"}, r"has 'e': 'h.\{n\}'. Write only \{\} .*from \{0\}"),
    ({"e": ONE}, {"e": "h.{}.{0}"}, "or number all"),
    ({"e_0": ONE}, {"e_{}": "m.{}.{}"}, r"Number them, the path's first: 'layer.\{1\}.expert"),
    ({"k": ONE[:4], "q": ONE[:8, :8]}, CORNERS, "t would consist of k, q, which do not"),
    (
        {"k": FLOAT8, "q": FLOAT8.astype("float8_e5m2")},
        HALVES,
        "dtypes in t: .*q is float8_e5m2.",
    ),
]


def test_names_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    for params, names, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            export_safetensors(tmp_path / "w", params, names=names)
    assert not any(tmp_path.iterdir())


NUMBERED = [
    # A number may be in a name twice; the tensors here are scalars.
    (
        {"w": np.arange(6, dtype=np.int32).reshape(2, 3)},
        {"w": "h.{0}.layer{0}.{1}"},
        {f"h.{n}.layer{n}.{e}": np.int32(3 * n + e) for n in range(2) for e in range(3)},
    ),
    # Those of a path come before those of a stack.
    (
        {f"expert_{e}": np.arange(6.0).reshape(2, 3) + 10 * e for e in range(2)},
        {"expert_{}": "m.{1}.e.{0}.w"},
        {f"m.{n}.e.{e}.w": np.arange(3.0) + 3 * n + 10 * e for n in range(2) for e in range(2)},
    ),
]


@pytest.mark.parametrize("params, names, wanted", NUMBERED)
def test_what_is_counted_may_be_numbered(tmp_path, params, names, wanted):
    params = jax.tree.map(lambda x: x.astype(x.dtype.name.replace("64", "32")), params)
    found = exported(tmp_path / "w", params, names)
    assert found.keys() == wanted.keys()
    assert_equal_bits(found, wanted)
    assert_equal_bits(import_safetensors(tmp_path / "w", params, names=names), params)


def test_files_that_differ_are_an_error(tmp_path):
    narrow = lambda name: {name: theirs()[name].astype(np.float16)}
    without = lambda what: {name: x for name, x in theirs().items() if what not in name}
    for files, message in [
        (theirs() | narrow("m.2.qk.bias"), r"layers of layers/q/bias are float16 and float32 in"),
        (without("m.1.qk.bias"), r"m.1.qk.bias is not in the files, but other layers of l"),
        (theirs() | {"m.3.up": numbers(2)}, r"only in the checkpoint: m.3.up \(ignore="),
    ]:
        with pytest.raises(ValueError, match=message):
            import_safetensors(saved(tmp_path, files), ours(theirs()), names=NAMES)


def test_what_is_kept_may_have_another_shape_in_the_files(tmp_path):
    """A new classifier, and layers of another size."""
    like = ours(theirs()) | {"cls": numbers(5), "up_1": numbers(IN, 7)}
    with pytest.raises(ValueError, match=r"and cls, which is \[5\].*or keep= to keep your own"):
        import_safetensors(saved(tmp_path), like, names=NAMES)
    params = import_safetensors(tmp_path, like, names=NAMES, keep="^cls$|up_1")
    assert_equal_bits([params["cls"], params["up_1"]], [like["cls"], like["up_1"]])
    assert_equal_bits(params["up_2"], ours(theirs())["up_2"])


def test_what_is_kept_claims_no_tensor_that_another_is_named(tmp_path):
    files = {"b.w": numbers(4)}
    like = {"a": {"w": numbers(4) + 1}, "b": {"w": numbers(4) + 2}}
    names = {"a/w": "b.w"}
    params = import_safetensors(saved(tmp_path, files), like, names=names, keep="^b/")
    assert_equal_bits([params["a"]["w"], params["b"]["w"]], [files["b.w"], like["b"]["w"]])
    with pytest.raises(ValueError, match=r"b.w would consist of a/w, b/w"):
        import_safetensors(tmp_path, like, names=names)


def test_a_stack_without_layers_has_no_tensors(tmp_path):
    like, names = {"other": {"w": numbers(16, 8)}, "l": numbers(0, 4)}, {"l": "h.{}.l"}
    files = saved(tmp_path, {"other.w": numbers(16, 8)})
    with pytest.raises(ValueError, match=r"not in the checkpoint: l \(keep="):
        import_safetensors(files, like, names=names)
    assert_equal_bits(import_safetensors(files, like, names=names, keep="^l$"), like)


def test_a_tensor_that_is_named_as_a_parameter_of_another_is_refused(tmp_path):
    """It is left over."""
    files, like = {"wte": numbers(4), "embed": numbers(4) + 1}, {"embed": numbers(4)}
    with pytest.raises(ValueError, match=r"only in the checkpoint: embed \(ignore="):
        import_safetensors(saved(tmp_path, files), like, names={"embed": "wte"})
    names = {"embed": "wte", "wte": "embed"}
    params = import_safetensors(tmp_path, like | {"wte": numbers(4)}, names=names)
    assert_equal_bits([params["embed"], params["wte"]], [files["wte"], files["embed"]])


def halves_as_neighbours(x):
    """A head of rotated halves, as one of neighbours."""
    return np.stack(np.split(x.reshape(2, 6, 5), 2, axis=1), -1).transpose(2, 0, 1, 3)


LAYOUTS = [
    ("out in -> in out", (7, 5), lambda x: x.T),
    ("(heads dim) in -> in heads dim", (8, 5), lambda x: x.reshape(2, 4, 5).transpose(2, 0, 1)),
    ("out (heads dim) -> heads dim out", (5, 8), lambda x: x.T.reshape(2, 4, 5)),
    ("in (1/3 out) -> in out", (5, 12), lambda x: np.split(x, 3, axis=1)[1]),
    ("out in y x -> y x in out", (5, 4, 3, 2), lambda x: x.transpose(2, 3, 1, 0)),
    ("1 1 out -> out", (1, 1, 6), lambda x: x[0, 0]),
    ("(heads two pair) in -> in heads pair two", (12, 5), halves_as_neighbours),
]


@pytest.mark.parametrize("text, shape, want", LAYOUTS)
def test_the_layouts_of_the_guide_are_what_it_says(tmp_path, text, shape, want):
    """Beside numpy's own way, and back; of parts, all are read."""
    parts = int(text[text.index("/") + 1]) if "/" in text else 1
    layouts = [text.replace("(1/", f"({n}/") for n in range(parts)]
    names = {f"w_{n}": ("t", layout) for n, layout in enumerate(layouts)}
    stored = numbers(*shape)
    wanted = want(stored)
    like = {name: np.zeros_like(wanted) for name in names}
    params = import_safetensors(saved(tmp_path, {"t": stored}), like, names=names)
    assert_equal_bits(params[f"w_{parts // 2}"], wanted)
    assert f"`{text}`" in (ROOT / "docs" / "weights.md").read_text()
    assert_equal_bits(exported(tmp_path / "w", params, names), {"t": stored})
