"""What cannot be saved, restored or asked for is refused, and changes no file."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.checkpoint.states import STATE, loss_fn, make_state, save_steps
from zerojax.checkpoint import export_safetensors, import_safetensors

W = STATE["w"]
SHAPES = {"w": jax.ShapeDtypeStruct((3, 4), "float32")}
ROUND: list = []
ROUND.append(ROUND)  # holds itself
GONE = {"a": jnp.ones(4), "z": jnp.ones(3)}
GONE["z"].delete()


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """A directory of checkpoints, weights and files."""
    at = tmp_path_factory.mktemp("at")
    save_steps(at / "loop", 5, 10, 100)
    for name in ("c", "headless"):
        zerojax.save(at / name, STATE, step=1)
    for name in ("_METADATA", "zerojax_checksums.json"):
        (at / "headless" / name).unlink()
    export_safetensors(at / "w", STATE)
    (at / "part.orbax-checkpoint-tmp").mkdir()
    (at / "file").write_text("")
    return at


def contents(directory):
    found = sorted(directory.rglob("*"))
    return [(path, path.read_bytes() if path.is_file() else None) for path in found]


def save(state, name="new", **options):
    return lambda at: zerojax.save(at / name, state, **options)


def restore(name, like=STATE, **options):
    return lambda at: zerojax.restore(at / name, like, **options)


def export(params, name="new", **options):
    return lambda at: export_safetensors(at / name, params, **options)


def weights(name="w", like=STATE, **options):
    return lambda at: import_safetensors(at / name, like, **options)


def loop(**options):
    return lambda at: zerojax.Checkpoints(at / "new", **options)


EVERY = r"every and keep must be positive integers \(keep=None keeps all\)"
NO_PATTERN = "is not a path pattern. Pass one regular expression"
EMPTY = "is empty or has an empty alternative: .*every path. Leave the option out, or pass"
BYTES = "max_file_bytes={} must be a positive number of bytes"
REFUSED = [
    (save(STATE, "c", step=2), r"/c exists, and nothing is overwritten. Save to a new path"),
    (export(STATE, "w"), r"/w exists, and nothing is overwritten. Export to a new path"),
    (save(STATE, "file/c"), r"/file/c cannot be written \(.*Choose another directory"),
    (save({"p": {"w": W, "n": "adam"}}), r"p/n is a str, not an array. Make it a static field"),
    (save({}), "no leaves, so there is nothing to save"),
    (save(SHAPES), "w is a shape without values. Pass a state with arrays"),
    (save(GONE), r"this state was donated to an earlier step.*state leaf z is gone"),
    (save(STATE, step=-1), "step is -1, not a count of steps. Pass an integer, 0 or more"),
    (save(STATE, rng=3), r"rng=3 is not a random key.*metadata="),
    (save(STATE, metadata={"f": loss_fn}), r"metadata/f is a function.*Make it numbers, strings"),
    (save(STATE, metadata=ROUND), "rng=, data= or metadata= .*contains itself"),
    (save(STATE, plan=3), "plan= takes a plan, got 3"),
    (restore("none"), r"nothing at .*/none\. Pass the directory that you passed to zerojax.save"),
    (restore("part"), r"/part.orbax-checkpoint-tmp was never finished"),
    (restore("loop"), "is not a .*, but contains some: 5, 10, 100. Pass one of them: .*/loop/100"),
    (restore("file"), r"is a file.*flax.serialization.from_bytes\(make_state"),
    (restore("w"), "has safetensors, not a checkpoint. .* zerojax.checkpoint.import_safetensors"),
    (restore("headless"), "no complete checkpoint at .*Its _METADATA, .* is missing"),
    (restore("c", make_state), r"has no placement. Pass zerojax.plan\(make_state"),
    (restore("c", cast="x"), "cast='x' must be True or False"),
    (restore("c", ignore=3), f"ignore=3 {NO_PATTERN}"),
    (restore("c", keep="("), r"keep= has .*'\(', which is not a regular.*Escape"),
    (restore("c", keep=""), f"keep= has the path pattern '', which {EMPTY}"),
    (restore("c", ignore=""), f"ignore= has the path pattern '', which {EMPTY}"),
    (weights(keep=""), f"keep= has the path pattern '', which {EMPTY}"),
    (weights(ignore=r"v\||w|"), f"ignore= has .*w.', which {EMPTY}"),
    (restore("c", SHAPES, keep="w"), "has only its shape. Pass a placed state"),
    (export(None), "you passed a NoneType without parameters.*Pass a state"),
    (export({"k": jax.random.key(0)}), "k is key<fry>.*Cast it or leave it out"),
    (export({"a": {"b": W}, "a.b": W}), r"a\.b would consist of a/b, a\.b, .*Rename one"),
    (export({"a": W, "b": W}, names={"a": "b"}), "b would consist of a, b, .*Rename one"),
    (export({"__metadata__": W}), "__metadata__ would be called __metadata__, .* is no tensor"),
    (export(STATE, names={"w": "__metadata__"}), "w would be called __metadata__.*name in names="),
    (weights("none"), r"/none does not exist. Pass a directory with model.safetensors.index.json"),
    (weights(names=[]), "names= is a list. Pass a dict"),
    (weights(rename={"a": "w"}), "rename={.*} is not a function. Pass one"),
    (weights(rename="w"), "rename='w' is not a function"),
    *((export(STATE, max_file_bytes=n), BYTES.format(n)) for n in (-1, None, float("nan"))),
    (export(STATE, max_file_bytes="5e9"), BYTES.format("'5e9'")),
    (weights(rename=lambda name: None), "rename= makes None of 'w'.*ignore="),
    (loop(keep=0), f"keep=0, .*{EVERY}"),
    (loop(every="3"), f"every='3', .*{EVERY}"),
    (loop(mode="least"), "mode='least', .*mode 'min' or 'max'"),
    (loop(best=3), "best=3, .*best must be the name of one of"),
    (loop(background=1), "background=1.*background True or False"),
]


@pytest.mark.parametrize("use, message", REFUSED, ids=[message for _, message in REFUSED])
def test_it_is_refused(at, use, message):
    before = contents(at)
    with pytest.raises((TypeError, ValueError), match=message):
        use(at)
    assert contents(at) == before


def test_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    zerojax.save("~/c", STATE)
    assert (tmp_path / "c" / "_METADATA").exists()
    for path in (None, 3, b"c", {"w": jnp.ones(64)}):
        shown = "a dict" if isinstance(path, dict) else path
        refused = pytest.raises(TypeError, match=rf"{shown} is not a path. Pass a str or a pathlib")
        for call in (zerojax.Checkpoints, zerojax.checkpoint.read_extras):
            with refused:
                call(path)
        for call in (zerojax.save, zerojax.restore, export_safetensors):
            with refused:
                call(path, STATE)
