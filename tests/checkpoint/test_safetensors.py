"""Parameters out to safetensors and back, checked against the safetensors package itself."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from flax.training.train_state import TrainState

import zerojax
from tests.checkpoint.damage import full_disk
from tests.checkpoint.states import PARAMS, placed, plan_of
from tests.support.reference import assert_equal_bits
from zerojax.checkpoint import export_safetensors, import_safetensors

ONE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
A = {"a": np.ones(4, np.float32)}
W, B = np.arange(1024, dtype=np.float32).reshape(16, 64), np.ones(64, np.float32)
HEAD = np.arange(512).reshape(64, 8).astype(jnp.bfloat16)
NESTED = {"layer": {"w": W, "b": B}, "head": [HEAD]}
DOTTED = {"head.0": HEAD, "layer.b": B, "layer.w": W}


def test_parameters_go_out_in_files_that_others_read(tmp_path):
    state = zerojax.shard_train_state({"params": NESTED}, stage=3)
    export_safetensors(tmp_path / "w", state, max_file_bytes=3e3)
    index = json.loads((tmp_path / "w" / INDEX).read_text())
    found = {}
    for file in sorted((tmp_path / "w").glob("*.safetensors")):
        found |= safetensors.flax.load_file(file)
        with safetensors.safe_open(file, "numpy") as opened:  # transformers demands a format
            assert opened.metadata()["format"] == "pt"
    assert found.keys() == DOTTED.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == 64 * 8 * 2 + 64 * 4 + 16 * 64 * 4
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(set(index["weight_map"].values())) == files
    assert_equal_bits(found, DOTTED)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in DOTTED.items()}


def test_files_may_have_another_dtype(tmp_path):
    stack = np.linspace(0, 1, 3 * 64 * 16, dtype=np.float32).reshape(3, 64, 16)
    params = {"stack": stack, "w": W, "count": np.arange(4)}
    state = zerojax.shard_train_state({"params": params}, stage=3)
    export_safetensors(tmp_path / "w", state, names={"stack": "h.{}"}, dtype="bfloat16")
    narrow = lambda x: x.astype(jnp.bfloat16)
    wanted = {"w": narrow(W), "count": np.arange(4, dtype=np.int32)}
    wanted |= {f"h.{n}": narrow(layer) for n, layer in enumerate(stack)}
    found = safetensors.flax.load_file(tmp_path / "w" / ONE)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in wanted.items()}
    assert_equal_bits(found, wanted)
    with pytest.raises(TypeError, match="dtype='int8' is not a dtype of floats"):
        export_safetensors(tmp_path / "v", state, dtype="int8")


def test_files_of_the_package_come_in_where_a_plan_wants_them(tmp_path, monkeypatch):
    """Each device reads its own part only; the same for one file and for its directory."""
    safetensors.numpy.save_file(DOTTED, tmp_path / "model.safetensors")
    plan = zerojax.plan({"params": NESTED}, stage=3)
    asked, real = [], jax.make_array_from_callback

    def reading(shape, sharding, part):
        return real(shape, sharding, lambda index: asked.append(part(index).shape) or part(index))

    monkeypatch.setattr(jax, "make_array_from_callback", reading)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        params = import_safetensors(path, plan)
        assert_equal_bits(params, NESTED)
        for value, leaf in zip(jax.tree.leaves(params), plan.params, strict=True):
            assert value.sharding.is_equivalent_to(leaf.rest.sharding(plan.mesh), value.ndim)
    assert set(asked) == {(8, 8), (64,), (2, 64)} and len(asked) == 2 * (8 + 1 + 8)


# -- arrays that rest padded


def test_files_hold_arrays_without_padding_and_are_read_into_padded_shards(tmp_path):
    state, tupled = placed(), zerojax.plan((PARAMS, ()))
    trees = {"state": state, "params": state.params, "tuple": (state.params, ())}
    for name, tree in trees.items():
        plan = None if name == "state" else state.tx.plan
        export_safetensors(tmp_path / name, tree, plan=plan)
        assert_equal_bits(safetensors.numpy.load_file(tmp_path / name / ONE), PARAMS)
        index = json.loads((tmp_path / name / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in PARAMS.values())
    export_safetensors(tmp_path / "c", PARAMS)
    for like in (plan_of(), state, tupled):
        params = import_safetensors(tmp_path / "c", like=like)
        assert_equal_bits(params, state.params)
        assert [s.data.shape for s in params["v"].addressable_shards] == [(13, 5)] * 8
    assert_equal_bits(import_safetensors(tmp_path / "c", like=state.params), state.params)
    computed = jax.tree.map(lambda x: 2 * x, state.params)
    with pytest.raises(ValueError, match=r"v: \[13, 33\] saved, \[13, 40\] wanted.*like="):
        import_safetensors(tmp_path / "c", like=computed)
    with pytest.raises(ValueError, match=r"params/scale is missing from the state"):
        export_safetensors(tmp_path / "d", {"w": state.params["w"]}, plan=tupled)


# -- names, dtypes, differences


def test_names_of_others_are_renamed(tmp_path):
    tensors = {"model.h.0.weight": jnp.arange(4096.0), "model.h.1.weight": jnp.ones(4096)}
    export_safetensors(tmp_path / "w", tensors)
    plan = zerojax.plan({"params": {"h": [{"scale": jnp.zeros(4096)}] * 2}}, stage=3)
    dotted = lambda name: name.removeprefix("model.").replace("weight", "scale")
    for rename in (dotted, lambda name: dotted(name).replace(".", "/")):
        back = import_safetensors(tmp_path / "w", plan, rename=rename)
        assert_equal_bits([layer["scale"] for layer in back["h"]], list(tensors.values()))
    with pytest.raises(ValueError, match=r"model.h.1.weight in .* is a second h.0.scale.*rename="):
        import_safetensors(tmp_path / "w", plan, rename=lambda name: "h.0.scale")
    message = r"model.h.0.weight, model.h.1.weight, not h.0.scale, h.1.scale. Pass rename="
    with pytest.raises(ValueError, match=message):
        import_safetensors(tmp_path / "w", plan)


def test_master_copies_would_write_old_parameters_back(tmp_path):
    params = {"frozen": np.ones((16, 8), np.float32), "w": np.ones((16, 8), np.float32)}
    txs = {"w": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    tx = optax.multi_transform(txs, {name: name for name in params})
    make = lambda: TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, params), tx=tx)
    export_safetensors(tmp_path / "w", params)
    for master, kept in (("split", "8-bit corrections"), ("float32", "master copies")):
        precision = zerojax.Precision(param="bfloat16", master=master)
        state = zerojax.shard_train_state(make, stage=3, precision=precision)
        with pytest.raises(ValueError, match=rf"{kept} of w, from.*before the state is placed"):
            import_safetensors(tmp_path / "w", like=state, cast=True)
    options = {"cast": True, "keep": "w$", "ignore": "w$"}
    import_safetensors(tmp_path / "w", like=state, **options)  # what is frozen has none
    import_safetensors(tmp_path / "w", like=zerojax.plan(state), cast=True)


def test_an_export_that_ends_early_names_the_file_and_leaves_nothing_behind(tmp_path):
    """Where the disk is full, and by Ctrl-C: of that a signal comes, too."""
    full = pytest.raises(OSError, match=rf"large; .*/{ONE} is not complete")
    ignores = signal.getsignal(signal.SIGXFSZ)
    ctrl_c = (signal.default_int_handler, pytest.raises(KeyboardInterrupt))
    for handler, raised in ((ignores, full), ctrl_c):
        signal.signal(signal.SIGXFSZ, handler)
        with full_disk(10_000), raised:
            export_safetensors(tmp_path / "w", {"a": np.ones(10_000)})
        assert not any(tmp_path.iterdir())
    signal.signal(signal.SIGXFSZ, ignores)
    # And where one was killed before.
    (tmp_path / "w.unfinished").mkdir()
    (tmp_path / "w.unfinished" / "model-00009-of-00009.safetensors").write_text("old")
    export_safetensors(tmp_path / "w", A)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == [ONE, INDEX]


# -- damage, and files that are made to harm


def entry(start, end, **other):
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | other


HEADERS = [
    ({"a": entry(0, 20)}, r"a, \[5\] of F32, does not lie at bytes 0 to 20"),
    ({"a": entry(0, 16, shape=[2**62, 0])}, "does not lie at"),
    ({"a": entry(0, 16, dtype="F4")}, "dtype 'F4', not one of F64"),
    ({"a": entry(0, 16, dtype=[])}, "unhashable"),
    ({"a": 3}, "must be a mapping"),
    ({"a": entry(0, 8), "b": entry(4, 16)}, "a ends at byte 8, and b is at 4"),
    ({"b": entry(8, 16), "a": entry(0, 4)}, "a ends at byte 4, and b is at 8"),
    ({"a": entry(4, 16)}, "the header ends at byte 0, and a is at 4"),
    ({"a": entry(0, 8), "b": entry(8, 8)}, "b ends at byte 8, and the end of the file is at 16"),
    ({}, "the header ends at byte 0, and the end of the file is at 16"),
    (json.dumps({"a": entry(0, 8), "b": entry(8, 16)}).replace("b", "a"), "it has a twice"),
    ("[" * 10**5, "recursion"),
]


def test_a_hostile_header_is_an_error(tmp_path):
    file = tmp_path / "h.safetensors"
    for header, says in HEADERS:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        for length, message in ((len(text), says), (2**40, f"a header of {2**40} bytes")):
            file.write_bytes(length.to_bytes(8, "little") + text + bytes(16))
            damaged = rf"h.safetensors is truncated or damaged .*{message}"
            with pytest.raises(ValueError, match=damaged):
                import_safetensors(file, A)


MISSING = r", which .*index\.json names, is missing\. Export it again"
OUTSIDE = "is damaged .*outside its directory"
INDEXES = [
    ({"a": "/etc/passwd"}, OUTSIDE),
    ({"a": "../x"}, OUTSIDE),
    ({"a": 3}, r"is damaged \(.*int\W*\)\. Export it again"),
    ({"a": ""}, MISSING),
    ({"a": "a\0b"}, MISSING),
    ("[" * 10**5, r"is damaged \(max.*Export it again"),
]


def test_a_hostile_index_is_an_error(tmp_path):
    for index, message in INDEXES:
        text = index if isinstance(index, str) else json.dumps({"weight_map": index})
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match=message):
            import_safetensors(tmp_path, A)


def test_a_flipped_byte_of_an_export_is_named(tmp_path):
    ones = np.ones((2, 8), jnp.bfloat16)
    params = {"a": np.arange(4, dtype=np.float32), "b": ones, "c": np.float32(1)}
    export_safetensors(tmp_path / "w", params)
    file = tmp_path / "w" / ONE
    whole = file.read_bytes()
    at = len(whole) - 4 - 32 + 5  # b lies between a and c
    file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    assert len(safetensors.flax.load_file(file)) == 3, "no other reader minds"
    said = rf"b in .*{ONE} is damaged: .*checksum. Export it again.*crc32:b"
    with pytest.raises(ValueError, match=said):
        import_safetensors(tmp_path / "w", params)
    rest = import_safetensors(tmp_path / "w", params, ignore="b", keep="b")
    assert_equal_bits([rest["a"], rest["c"]], [params["a"], params["c"]])
    shapes, names = {"x": ones.T}, {"x": ("b", "out in -> in out")}
    with pytest.raises(ValueError, match=r"b in .* is damaged"):
        import_safetensors(tmp_path / "w", shapes, names=names, ignore="a|c")
    for end in range(0, at, 5):
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=rf"{ONE} is truncated or damaged"):
            import_safetensors(tmp_path / "w", params)
