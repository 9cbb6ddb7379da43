"""Tensors that others named and laid out: each goes where `names=` says, and back."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from tests.reference import assert_equal_bits
from zerojax._checkpoint import safetensors as _safetensors
from zerojax._checkpoint.names import parsed, sources

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


def stage3(tree, devices=8):
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("data",))
    return zerojax.plan({"params": tree}, stage=3, mesh=mesh, min_shard_size=1, stacked="^layers")


@pytest.mark.parametrize("devices", [8, 3, 1])
def test_each_value_goes_where_it_belongs_and_back(tmp_path, devices):
    """Into shards of any number of devices, padded where they do not divide it."""
    want, plan = ours(theirs()), stage3(ours(theirs()), devices)
    params = zerojax.import_safetensors(saved(tmp_path), plan, names=NAMES)
    logical = zerojax.logical({"params": params}, plan)["params"]
    assert_equal_bits(logical, want)
    for value, leaf in zip(jax.tree.leaves(params), plan.params, strict=True):
        assert value.sharding.is_equivalent_to(leaf.rest.sharding(plan.mesh), value.ndim)
    assert any(leaf.rest.padding for leaf in plan.params) == (devices > 1)
    for target, given in (("a", params), ("b", want)):
        more = {"plan": plan} if target == "a" else {}
        zerojax.export_safetensors(tmp_path / target, given, names=NAMES, **more)
        (file,) = (tmp_path / target).glob("*.safetensors")
        found = safetensors.numpy.load_file(file)
        assert found.keys() == theirs().keys()
        assert_equal_bits(found, theirs())


def test_each_device_reads_its_own_part_only(tmp_path, monkeypatch):
    asked = []
    real = jax.make_array_from_callback

    def spy(shape, sharding, part):
        return real(shape, sharding, lambda index: asked.append(part(index).shape) or part(index))

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    names = {"layers": ("m.{}.up.weight", "out in -> in out")}
    files = {name: value for name, value in theirs().items() if ".up." in name}
    like = stage3({"layers": numbers(LAYERS, IN, 40)})
    params = zerojax.import_safetensors(saved(tmp_path, files), like, names=names)
    assert asked == [(LAYERS, IN // 8, 40)] * 8
    assert_equal_bits(params["layers"][1], files["m.1.up.weight"].T)


def test_one_tensor_at_a_time_is_on_the_host(tmp_path, monkeypatch):
    """A stack of layers goes out a layer at a time."""
    sizes = []
    real = _safetensors._move.to_host
    monkeypatch.setattr(
        _safetensors._move, "to_host", lambda value: sizes.append(value.shape) or real(value)
    )
    plan = stage3({"layers": numbers(LAYERS, IN, 40)})
    params = plan.place({"params": {"layers": numbers(LAYERS, IN, 40)}})["params"]
    names = {"layers": ("m.{}.up.weight", "out in -> in out")}
    zerojax.export_safetensors(tmp_path / "w", params, names=names)
    assert sizes == [(IN, 40)] * LAYERS


def test_experts_are_counted_too_and_may_be_sharded(tmp_path):
    """A device reads its own experts."""
    files = {f"m.{n}.experts.{e}.w": numbers(5, 8) + 10 * n + e for n in range(2) for e in range(4)}
    names = {"layers": ("m.{}.experts.{}.w", "out in -> in out")}
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    like = {"layers": jax.ShapeDtypeStruct((2, 4, 8, 5), jnp.float32, sharding=over)}
    params = zerojax.import_safetensors(saved(tmp_path, files), like, names=names)
    assert params["layers"].addressable_shards[1].data.shape == (2, 2, 8, 5)
    for n, e in np.ndindex(2, 4):
        assert_equal_bits(params["layers"][n, e], files[f"m.{n}.experts.{e}.w"].T)


def test_names_follow_rename_and_dtypes_cast(tmp_path):
    files = {f"pre.{name}": value for name, value in theirs().items()}
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), ours(theirs()))
    options = {"names": NAMES, "rename": lambda name: name.removeprefix("pre.")}
    with pytest.raises(ValueError, match=r"float32 saved, bfloat16 wanted.*\(cast=True"):
        zerojax.import_safetensors(saved(tmp_path, files), like, **options)
    params = zerojax.import_safetensors(tmp_path, like, cast=True, **options)
    want = ours(theirs())["layers"]["q"]["kernel"].astype(jnp.bfloat16)
    assert_equal_bits(params["layers"]["q"]["kernel"], want)


@pytest.mark.parametrize(
    "change, says",
    [({"embedd": "wte"}, "'embedd', which is no parameter. Name paths as cls, embed, layers/k"),
     ({"layers/q/kernel": "m.{}.{}.{}.{}.{}"}, r"each \{\} there counts.* is \[3, 16, 2, 4\]"),
     ({"up_{}": "up"}, r"each \{\} there counts what a \{\} of the path"),
     ({"embed": ("wte", "a b c -> a b c")}, r"embed 3 axes, as 'a b c -> a b c', and it is \[24,"),
     ({"layers/q/bias": ("m.{}.qk.bias", "d -> d")}, "1 axes.*with 1 to count layers. Name each"),
     ({"embed": ("wte", "a b")}, "embed out as 'a b'. Name each axis once on each side of ->"),
     ({"embed": ("wte", "a b -> a a")}, "Name each axis once"),
     ({"embed": ("wte", "a b c -> a b")}, "Name each axis once"),
     ({"embed": ("wte", "a b -> (a b)")}, "ours are names alone"),
     ({"embed": ("wte", "2 a b -> a b")}, "with a 1, or a part of several"),
     ({"embed": ("wte", "(2/2 a) b -> a b")}, "a part of several, as in '\\(0/3 out\\)'"),
     ({"embed": ("wte", "(a b -> a b")}, "embed out as '\\(a b -> a b'. Name each.*in brackets"),
     ({"embed": ("wte", "a) b -> a b")}, "in brackets"),
     ({"embed": ("wte", "((a) b) -> a b")}, "in brackets"),
     ({"embed": ("wte", "( ) a b -> a b")}, "in brackets"),
     ({"cls": "wte"}, "has embed, cls in wte, which they do not fill"),
     ({"layers/k/kernel": "m.{}.up.weight"}, "layers/q/kernel in m.0.qk.weight, which they"),
     ({"embed": ("wte", "a b -> b a")}, r"wte is \[24, 16\] in the.*make it \[16, 24\]. Give"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_names_is_an_error(tmp_path, change, says):
    names, like = NAMES | change, ours(theirs())
    with pytest.raises(ValueError, match=says):
        zerojax.import_safetensors(saved(tmp_path), like, names=names)


@pytest.mark.parametrize(
    "names, error, says",
    [([("embed", "wte")], TypeError, "names= is a list. Pass a dict.*a tensor is its name, or a p"),
     ({0: "wte"}, TypeError, "has 0 as 'wte'. Write paths to tensors"),
     ({"embed": None}, TypeError, "has 'embed' as None. Write.*pair of its name and a layout"),
     ({"embed": ("wte",)}, TypeError, r"has 'embed' as \('wte',\). Write"),
     ({"embed": ("wte", None)}, TypeError, r"has 'embed' as \('wte', None\). Write"),
     ({"embed": "h.{n}"}, ValueError, r"has 'embed' as 'h.\{n\}'. Write \{\} alone.*from \{0\}"),
     ({"embed": "h.{1}"}, ValueError, r"has 'embed' as 'h.\{1\}'. Write \{\} alone"),
     ({"embed": "h.{}.{0}"}, ValueError, "or number all"),
     ({"embed": ("h.{", "a b -> a b")}, ValueError, "or number all")],
)  # fmt: skip
def test_an_entry_that_names_no_tensor_is_an_error(tmp_path, names, error, says):
    params = {"embed": jnp.ones((24, IN))}
    with pytest.raises(error, match=says):
        zerojax.export_safetensors(tmp_path / "w", params, names=names)
    assert not any(tmp_path.iterdir())


def test_a_number_may_be_in_a_name_twice(tmp_path):
    """The tensors here are scalars."""
    names, w = {"w": "h.{0}.layer{0}.{1}"}, np.arange(6, dtype=np.int32).reshape(2, 3)
    zerojax.export_safetensors(tmp_path / "w", {"w": w}, names=names)
    (file,) = (tmp_path / "w").glob("*.safetensors")
    found = safetensors.numpy.load_file(file)
    assert set(found) == {f"h.{n}.layer{n}.{e}" for n in range(2) for e in range(3)}
    assert found["h.1.layer1.2"] == 5
    back = zerojax.import_safetensors(tmp_path / "w", {"w": jnp.zeros_like(w)}, names=names)
    assert_equal_bits(back["w"], w)


def test_files_that_differ_are_an_error(tmp_path):
    files, like = theirs(), ours(theirs())
    files["m.1.up.weight"] = files["m.1.up.weight"].astype(np.float16)
    with pytest.raises(ValueError, match=r"up_1: float16 saved, float32 wanted"):
        zerojax.import_safetensors(saved(tmp_path, files), like, names=NAMES)
    files = theirs() | {"m.2.qk.bias": numbers(2 * HEADS * DIM).astype(np.float16)}
    with pytest.raises(ValueError, match=r"layers of layers/q/bias are float16 and float32 in"):
        zerojax.import_safetensors(saved(tmp_path, files), like, names=NAMES)
    files = {name: value for name, value in theirs().items() if name != "m.1.qk.bias"}
    with pytest.raises(ValueError, match=r"m.1.qk.bias is not in the files, and other layers of l"):
        zerojax.import_safetensors(saved(tmp_path, files), like, names=NAMES)
    files = {name: value for name, value in theirs().items() if "qk.bias" not in name}
    with pytest.raises(ValueError, match=r": layers/k/bias \(as m.0.qk.bias\); layers/q/bi"):
        zerojax.import_safetensors(saved(tmp_path, files), like, names=NAMES)
    with pytest.raises(ValueError, match=r"only in the checkpoint: m.3.up.weight \(ignore="):
        files = theirs() | {"m.3.up.weight": numbers(40, IN)}
        zerojax.import_safetensors(saved(tmp_path, files), like, names=NAMES)


def test_what_is_kept_may_have_another_shape_in_the_files(tmp_path):
    """A new classifier, and layers of another size."""
    like = ours(theirs()) | {"cls": numbers(5), "up_1": numbers(IN, 7)}
    with pytest.raises(ValueError, match=r"cls, \[5\], make it.*keep your own with keep="):
        zerojax.import_safetensors(saved(tmp_path), like, names=NAMES)
    params = zerojax.import_safetensors(tmp_path, like, names=NAMES, keep="^cls$|up_1")
    assert_equal_bits([params["cls"], params["up_1"]], [like["cls"], like["up_1"]])
    assert_equal_bits(params["up_2"], ours(theirs())["up_2"])


def test_a_tensor_that_is_named_as_a_parameter_of_another_is_refused(tmp_path):
    """It would be neither read nor reported as left over."""
    files, like = {"wte": numbers(4), "embed": numbers(4) + 1}, {"embed": jnp.zeros(4)}
    for names in ({"embed": "wte"}, {"embed": "absent"}):
        with pytest.raises(ValueError, match=r"embed in .* is named as the .*finds in .*ignore="):
            zerojax.import_safetensors(saved(tmp_path, files), like, names=names)
    params = zerojax.import_safetensors(tmp_path, like, names={"embed": "wte"}, ignore="embed")
    assert_equal_bits(params["embed"], files["wte"])
    names = {"embed": "wte", "wte": "embed"}
    params = zerojax.import_safetensors(tmp_path, like | {"wte": jnp.zeros(4)}, names=names)
    assert_equal_bits([params["embed"], params["wte"]], [files["wte"], files["embed"]])


def test_an_export_under_names_that_are_taken_is_refused(tmp_path):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"a and b are both b. Rename one"):
        zerojax.export_safetensors(tmp_path / "w", params, names={"a": "b"})
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("other", ["float8_e5m2", "bfloat16", "int32"])
def test_parts_of_one_tensor_have_one_dtype(tmp_path, other):
    """Said before anything is written; a common dtype might lose what a part has."""
    params = {"k": jnp.ones((2, 4), "float8_e4m3fn"), "q": jnp.ones((2, 4), other)}
    names = {name: ("qk", f"({n}/2 out) in -> out in") for n, name in enumerate("kq")}
    with pytest.raises(TypeError, match=rf"qk has k, float8_e4m3fn, and q, {other}, as.*one dtype"):
        zerojax.export_safetensors(tmp_path / "w", params, names=names)
    assert not any(tmp_path.iterdir())


def test_a_part_is_a_view():
    """Nothing is copied, to read or to write."""
    layout = parsed("(1/3 heads dim) in -> in heads dim", "q")
    stored = numbers(3 * HEADS * DIM, IN)
    view = layout.view(stored, (IN, HEADS, DIM))
    assert view.base is stored or np.shares_memory(view, stored)
    want = stored[HEADS * DIM : 2 * HEADS * DIM].reshape(HEADS, DIM, IN).transpose(2, 0, 1)
    assert_equal_bits(view, want)


@pytest.mark.parametrize(
    "text, shape, ours",
    [("out in -> in out", (5, 7), lambda x: x.T),
     ("(heads dim) in -> in heads dim", (5, 2, 4), lambda x: x.reshape(2, 4, 5).transpose(2, 0, 1)),
     ("out (heads dim) -> heads dim out", (2, 4, 5), lambda x: x.T.reshape(2, 4, 5)),
     ("in (1/3 out) -> in out", (5, 4), lambda x: np.split(x, 3, axis=1)[1]),
     ("out in y x -> y x in out", (3, 2, 4, 5), lambda x: x.transpose(2, 3, 1, 0)),
     ("1 1 out -> out", (6,), lambda x: x[0, 0]),
     # A head of rotated halves, as one of neighbours.
     ("(heads two pair) in -> in heads pair two", (5, 2, 3, 2),
      lambda x: np.stack(np.split(x.reshape(2, 6, 5), 2, axis=1), -1).transpose(2, 0, 1, 3))],
)  # fmt: skip
def test_the_layouts_of_the_guide_are_what_it_says(text, shape, ours):
    """Each in both directions, beside numpy's own way."""
    layout = parsed(text, "w")
    stored = numbers(*layout.stored_shape(shape))
    assert_equal_bits(layout.view(stored, shape), ours(stored))
    assert f"`{text}`" in (ROOT / "docs" / "huggingface.md").read_text()
    made = np.zeros_like(stored)
    layout.view(made, shape)[...] = ours(stored)
    part = made != 0
    assert_equal_bits(made[part], stored[part])
    assert part.sum() == np.prod(shape)


def test_sources_tell_which_parameter_has_a_tensor():
    found = sources(NAMES, {name: np.shape(leaf) for name, leaf in flat(ours(theirs())).items()})
    assert {name for name in theirs() if name != "other.w"} == set(found)
    leaves = [source.leaf for source in found["m.1.qk.weight"]]
    assert leaves == ["layers/q/kernel", "layers/k/kernel"]
    assert found["m.1.qk.weight"][0].index == (1,) and found["m.1.up.weight"][0].leaf == "up_1"


def flat(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_parts_of_a_tensor_are_split_along_one_axis():
    """Halves of columns and halves of rows overlap, and leave a corner to nobody."""
    names = {"a": ("t", "(0/2 out) in -> out in"), "b": ("t", "out (1/2 in) -> out in")}
    with pytest.raises(ValueError, match=r"a, b in t, which they do not fill"):
        sources(names, {"a": (2, 4), "b": (4, 2)})


def test_a_parameter_is_named_once():
    with pytest.raises(ValueError, match=r"l_0 twice, by 'l_\{\}' and by 'l_0'. Leave one out"):
        sources({"l_{}": "m.{}", "l_0": "first"}, {"l_0": (2,), "l_1": (2,)})


def test_numbers_of_a_path_and_of_a_dimension_are_told_apart():
    shapes = {"expert_0": (2, 3), "expert_1": (2, 3)}
    with pytest.raises(ValueError, match=r"Number them, the path's first: 'layer.\{1\}.expert"):
        sources({"expert_{}": "m.{}.e.{}.w"}, shapes)
    found = sources({"expert_{}": "m.{1}.e.{0}.w"}, shapes)
    assert {name: (s.leaf, s.index) for name, (s,) in found.items()} == {
        f"m.{layer}.e.{expert}.w": (f"expert_{expert}", (layer,))
        for layer in (0, 1)
        for expert in (0, 1)
    }
