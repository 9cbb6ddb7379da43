"""Parameters out to safetensors and back, checked against the safetensors package itself."""

import json
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from etils import epath
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests import nnx_models
from tests.checkpoint.damage import right_or_named
from tests.checkpoint.states import STATE, make_state, place, plan_of
from tests.reference import assert_equal_bits
from zerojax._checkpoint import files as _files
from zerojax._plan import move as _move


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_go_out_in_files_that_others_read(tmp_path, stage):
    state = place(stage)
    zerojax.export_safetensors(tmp_path / "w", state, max_file_bytes=3e3)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted((tmp_path / "w").glob("*.safetensors")):
        found |= safetensors.flax.load_file(file)
    assert set(found) == {"head.0", "layer.b", "layer.w"} == set(index["weight_map"])
    assert index["metadata"]["total_size"] == 64 * 8 * 2 + 64 * 4 + 16 * 64 * 4
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert_equal_bits([found["head.0"], found["layer.b"], found["layer.w"]], state.params)


@pytest.mark.parametrize("stage, devices", [(3, 8), (3, 2), (1, 4), (0, 1)])
def test_parameters_come_in_where_a_plan_wants_them(tmp_path, stage, devices):
    zerojax.export_safetensors(tmp_path / "w", make_state().params)
    plan = plan_of(stage, devices)
    params = zerojax.import_safetensors(tmp_path / "w", plan)
    assert_equal_bits(params, make_state().params)
    specs = [leaf.spec for leaf in plan.params]
    for value, spec in zip(jax.tree.leaves(params), specs, strict=True):
        want = jax.sharding.NamedSharding(plan.mesh, spec)
        assert value.sharding.is_equivalent_to(want, value.ndim)


def test_each_device_reads_its_own_part_only(tmp_path, monkeypatch):
    zerojax.export_safetensors(tmp_path / "w", make_state().params)
    asked = []
    real = jax.make_array_from_callback

    def spy(shape, sharding, part):
        return real(shape, sharding, lambda index: asked.append(part(index).shape) or part(index))

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    zerojax.import_safetensors(tmp_path / "w", plan_of(3, 8))
    assert set(asked) == {(8, 8), (64,), (2, 64)} and len(asked) == 17


def test_files_of_the_package_come_in(tmp_path):
    tensors = {"a.b": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": np.array(3, np.int32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    like = {"a": {"b": jnp.zeros((2, 3))}, "n": jnp.int32(0)}
    for path in (tmp_path, tmp_path / "model.safetensors"):
        back = zerojax.import_safetensors(path, like)
        assert_equal_bits([back["a"]["b"], back["n"]], [tensors["a.b"], tensors["n"]])


def test_names_of_others_are_renamed(tmp_path):
    tensors = {"model.h.0.weight": jnp.arange(4096.0), "model.h.1.weight": jnp.ones(4096)}
    zerojax.export_safetensors(tmp_path / "w", tensors)
    plan = zerojax.plan({"params": {"h": [{"scale": jnp.zeros(4096)}] * 2}}, stage=3)
    dotted = lambda name: name.removeprefix("model.").replace("weight", "scale")
    for rename in (dotted, lambda name: dotted(name).replace(".", "/")):
        back = zerojax.import_safetensors(tmp_path / "w", plan, rename=rename)
        first, second = (layer["scale"] for layer in back["h"])
        assert_equal_bits([first, second], list(tensors.values()))
        assert first.addressable_shards[0].data.shape == (512,)
    with pytest.raises(ValueError, match=r"model.h.1.weight in .* is a second h/0/scale.*rename="):
        zerojax.import_safetensors(tmp_path / "w", plan, rename=lambda name: "h.0.scale")


def test_master_copies_would_write_old_parameters_back(tmp_path):
    params = {"frozen": jnp.ones((16, 8)), "w": jnp.ones((16, 8))}
    labels = {"frozen": "no", "w": "yes"}
    tx = optax.multi_transform({"yes": optax.adam(1e-3), "no": optax.set_to_zero()}, labels)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    precision = zerojax.Precision(param="bfloat16", master="float32")
    state = zerojax.shard_train_state(state, stage=3, precision=precision)
    zerojax.export_safetensors(tmp_path / "w", params)
    with pytest.raises(ValueError, match=r"copies of w, from.*before the state is placed"):
        zerojax.import_safetensors(tmp_path / "w", like=state, cast=True)
    options = {"cast": True, "keep": "w$", "ignore": "w$"}
    zerojax.import_safetensors(tmp_path / "w", like=state, **options)  # what is frozen has none
    zerojax.import_safetensors(tmp_path / "w", like=zerojax.plan(state), cast=True)
    model, optimizer = nnx_models.make()
    zerojax.nnx.shard(model, optimizer, stage=3, precision=precision)
    of_nnx = zerojax.nnx.state(model, optimizer)
    zerojax.export_safetensors(tmp_path / "nnx", of_nnx)
    with pytest.raises(ValueError, match=r"copies of layers/0/kernel.*before the state is placed"):
        zerojax.import_safetensors(tmp_path / "nnx", like=of_nnx)


def test_differences_are_errors_that_say_what_to_do(tmp_path):
    zerojax.export_safetensors(tmp_path / "w", {"a": jnp.ones(4), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"not in the checkpoint: c .*only in.*: b \(ignore"):
        zerojax.import_safetensors(tmp_path / "w", {"a": jnp.ones(4), "c": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"a: float32 saved, bfloat16 wanted \(cast=True"):
        zerojax.import_safetensors(tmp_path / "w", {"a": jnp.ones(4, "bfloat16")}, ignore="b")
    back = zerojax.import_safetensors(
        tmp_path / "w", {"a": jnp.zeros(4, "bfloat16")}, ignore="b", cast=True
    )
    assert back["a"].dtype == jnp.bfloat16 and back["a"].sum() == 4
    with pytest.raises(ValueError, match=r"w exists, and nothing is overwritten"):
        zerojax.export_safetensors(tmp_path / "w", {"a": jnp.ones(4)})
    with pytest.raises(TypeError, match=r"k is key<fry>.*Cast it or leave it out"):
        zerojax.export_safetensors(tmp_path / "k", {"k": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"a/b and a.b are both a.b. Rename one"):
        zerojax.export_safetensors(tmp_path / "k", {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "model.safetensors")  # which nothing is ever written to
    with pytest.raises(ValueError, match=r"there is no model.safetensors.index.json"):
        zerojax.import_safetensors(tmp_path / "empty", {"a": jnp.ones(4)})


def test_options_of_an_import_that_are_something_else(tmp_path):
    params = {"a": jnp.ones(4)}
    zerojax.export_safetensors(tmp_path / "w", params)
    zerojax.save(tmp_path / "c", params)
    for read, path in ((zerojax.import_safetensors, "w"), (zerojax.restore, "c")):
        with pytest.raises(TypeError, match=r"cast='x' must be True or False"):
            read(tmp_path / path, params, cast="x")
        with pytest.raises(TypeError, match=r"ignore=3 is no path pattern. Pass one regular"):
            read(tmp_path / path, params, ignore=3)
    with pytest.raises(TypeError, match=r"names= is a list. Pass a dict"):
        zerojax.import_safetensors(tmp_path / "w", params, names=[])


def test_what_jax_would_narrow_goes_out_as_it_is(tmp_path):
    tensors = {"a": np.arange(3) / 7, "b": np.array([2**40]), "c": 3}
    zerojax.export_safetensors(tmp_path / "w", tensors)
    found = safetensors.numpy.load_file(tmp_path / "w" / "model-00001-of-00001.safetensors")
    assert {k: v.dtype.name for k, v in found.items()} == {
        "a": "float64",
        "b": "int64",
        "c": "int64",
    }
    assert found["a"].tolist() == tensors["a"].tolist() and found["b"] == 2**40 and found["c"] == 3


def test_an_export_that_was_ended_leaves_nothing_behind(tmp_path):
    (tmp_path / "w.unfinished").mkdir()
    (tmp_path / "w.unfinished" / "model-00009-of-00009.safetensors").write_text("old")
    zerojax.export_safetensors(tmp_path / "w", {"a": jnp.ones(4)})
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    assert len(list((tmp_path / "w").iterdir())) == 2


def test_a_second_export_to_one_path_is_refused(tmp_path):
    target, lock = epath.Path(tmp_path / "w"), epath.Path(tmp_path / ".w.lock")
    with (
        _files.only_writer(target, lock),
        pytest.raises(ValueError, match=r"something else is writing to .*/w. Give each"),
    ):
        zerojax.export_safetensors(tmp_path / "w", {"a": jnp.ones(4)})
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    params = {"a": jnp.ones(10_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"large; .*/model-00001-of-00001.safetensors is not compl"
        ):
            zerojax.export_safetensors(tmp_path / "w", params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())


def test_damaged_files_are_named(tmp_path):
    params = {"a": jnp.ones(64)}
    zerojax.export_safetensors(tmp_path / "w", params)
    file = next((tmp_path / "w").glob("*.safetensors"))
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole[:40], b"", b"\xff" * 20, whole.replace(b"[64]", b"[65]")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"of-00001.safetensors is truncated or damaged"):
            zerojax.import_safetensors(tmp_path / "w", params)
    file.unlink()
    with pytest.raises(ValueError, match=r"of-00001.safetensors is missing, and .*index.json"):
        zerojax.import_safetensors(tmp_path / "w", params)
    index = tmp_path / "w" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(ValueError, match=r"index.json is damaged .*outside of its directory"):
        zerojax.import_safetensors(tmp_path / "w", params)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        zerojax.import_safetensors(tmp_path / "w", params)


def entry(start, end, **other):
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | other


@pytest.mark.parametrize(
    "header, says",
    [
        ({"a": entry(0, 16), "b": entry(0, 16)}, "two tensors at byte 0"),
        ({"a": entry(0, 12), "b": entry(8, 16)}, "two tensors at byte 8"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, "no tensor at byte 8"),
        ({"a": entry(0, 12)}, "no tensor at byte 12"),
        ({"a": entry(0, 20)}, r"a, \[5\] of F32, does not lie at bytes 0 to 20"),
        ({"a": entry(0, 16, shape=[-2, -2])}, "does not lie at"),
        ({"a": entry(0, 16, shape=[4.0])}, "does not lie at"),
        ({"a": entry(0, 16, shape=[2**62, 0])}, "does not lie at"),
        ({"a": entry(0, 16, dtype="F4")}, "dtype 'F4', which is none of F64"),
        ({"a": entry(0, 16, dtype=[])}, "unhashable"),
        ({"a": entry(0, 16, more=1)}, "more"),
        ({"a": 3}, "must be a mapping"),
        ("[" * 10**5, "recursion"),
        (json.dumps({"a": entry(0, 8), "b": entry(8, 16)}).replace('"b"', '"a"'), "a name twice"),
    ],
)
def test_a_hostile_header_is_an_error(tmp_path, header, says):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = tmp_path / "h.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match=rf"h.safetensors is truncated or damaged \(.*{says}"):
        zerojax.import_safetensors(file, {"a": jnp.ones(4)})
    file.write_bytes((2**40).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=rf"a header of {2**40} bytes"):
        zerojax.import_safetensors(file, {"a": jnp.ones(4)})


@pytest.mark.parametrize(
    "names, says",
    [(["/etc/passwd"], "is damaged .*outside of its"), (["../x"], "is damaged .*outside of its"),
     ([3], "is damaged"), ([["a"]], "is damaged"), ([".."], r"/\.\. is missing"),
     ([""], "is missing"), (["a\0b"], "is missing")],
)  # fmt: skip
def test_a_hostile_index_is_an_error(tmp_path, names, says):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    with pytest.raises(ValueError, match=says):
        zerojax.import_safetensors(tmp_path, {"a": jnp.ones(4)})
    index.write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"index.json is damaged \(max.*Export it again"):
        zerojax.import_safetensors(tmp_path, {"a": jnp.ones(4)})


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_export_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(_move, "to_host", fail)
    with pytest.raises(error):
        zerojax.export_safetensors(tmp_path / "w", {"a": jnp.ones(4)})
    assert not any(tmp_path.iterdir())


def test_names_of_others_are_told_of_rename(tmp_path):
    zerojax.export_safetensors(tmp_path / "w", {"fc.weight": jnp.ones(4)})
    like = {"dense": {"kernel": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"fc.weight and not dense.kernel. Pass rename="):
        zerojax.import_safetensors(tmp_path / "w", like)
    with pytest.raises(TypeError, match=r"rename= made None of 'fc.weight'.*ignore="):
        zerojax.import_safetensors(tmp_path / "w", like, rename=lambda name: None)
    with pytest.raises(TypeError, match=r"rename= is dict. Pass a function"):
        zerojax.import_safetensors(tmp_path / "w", like, rename={"fc.weight": "dense.kernel"})
    with pytest.raises(ValueError, match=r"nothere.safetensors does not exist"):
        zerojax.import_safetensors(tmp_path / "nothere.safetensors", like)


def test_damage_to_an_export_is_never_read(tmp_path):
    zerojax.export_safetensors(tmp_path / "w", {"w": STATE["w"], "b": jnp.ones(3)})
    like = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(3)}
    read = lambda: {"w": zerojax.import_safetensors(tmp_path / "w", like)["w"]}
    file = next((tmp_path / "w").glob("*.safetensors"))
    whole = file.read_bytes()
    for at in [*range(0, len(whole) - 60, 3), *range(len(whole) - 60, len(whole))]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        is_right = right_or_named(tmp_path / "w", read)
        assert not is_right or at < len(whole) - 60, "of the data, none is left unseen"
        file.write_bytes(whole[:at])
        assert not right_or_named(tmp_path / "w", read)


def test_a_flipped_byte_of_an_export_is_named(tmp_path):
    params = {"a": jnp.arange(4.0), "b": jnp.ones((2, 8), "bfloat16"), "c": jnp.ones(())}
    zerojax.export_safetensors(tmp_path / "w", params)
    file = tmp_path / "w" / "model-00001-of-00001.safetensors"
    whole = file.read_bytes()
    with safetensors.safe_open(file, "numpy") as opened:  # no other reader minds
        metadata = opened.metadata()
        assert metadata.pop("format") == "pt" and len(metadata) == 3
    at = len(whole) - 4 - 32 + 5  # b lies between a and c
    file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    said = r"b in .*of-00001.safetensors is damaged: .*checksum. Export it again.*crc32:b"
    with pytest.raises(ValueError, match=said):
        zerojax.import_safetensors(tmp_path / "w", params)
    rest = zerojax.import_safetensors(tmp_path / "w", params, ignore="b", keep="b")
    assert_equal_bits([rest["a"], rest["c"]], [params["a"], params["c"]])
    shapes, names = {"x": jnp.zeros((8, 2), "bfloat16")}, {"x": ("b", "out in -> in out")}
    with pytest.raises(ValueError, match=r"b in .* is damaged"):
        zerojax.import_safetensors(tmp_path / "w", shapes, names=names, ignore="a|c")
