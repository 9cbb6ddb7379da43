"""Step, key, data and metadata saved with a state, as data that runs no code."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import zerojax
from tests.checkpoint.states import STATE, loss_fn, place, words
from tests.reference import assert_equal_bits
from zerojax._checkpoint import files as _files


def test_step_rng_data_and_metadata_are_saved_with_a_state(tmp_path):
    class Iterator:
        def get_state(self):
            return b"\x00at 12"

    metadata = {"run": "a", "lr": 1e-3, "shape": (2, [3]), "mean": np.arange(3, dtype=np.float16)}
    rng = jax.random.key(3, impl="rbg")
    zerojax.save(
        tmp_path / "c", place(), step=12, rng=rng, data=Iterator(), metadata=metadata
    )  # fmt: skip
    extras = zerojax.read_extras(tmp_path / "c")
    assert (extras.step, extras.data) == (12, b"\x00at 12")
    assert extras.rng.dtype == rng.dtype
    assert_equal_bits(words([extras.rng]), words([rng]))
    mean = extras.metadata.pop("mean")
    assert extras.metadata == {"run": "a", "lr": 1e-3, "shape": (2, [3])}
    assert mean.dtype == np.float16 and mean.tolist() == [0, 1, 2]


def test_extras_that_are_not_data_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"metadata/model is a function.*Make it numbers, strings"):
        zerojax.save(tmp_path / "c", place(), metadata={"model": loss_fn})
    with pytest.raises(TypeError, match=r"metadata/a is a dict with the keys \[1\]"):
        zerojax.save(tmp_path / "c", place(), metadata={"a": {1: 2}})


def test_extras_are_read_without_the_rest_but_checked(tmp_path, monkeypatch):
    zerojax.save(tmp_path / "c", place(), step=4)
    read = []
    monkeypatch.setattr(_files, "_size_and_crc", lambda file, real=_files._size_and_crc: (
        read.append(file.name) or real(file)))  # fmt: skip
    assert zerojax.read_extras(tmp_path / "c").step == 4 and read == ["_METADATA"]
    metadata = tmp_path / "c" / "_METADATA"
    metadata.write_text(metadata.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(ValueError, match=r"_METADATA is damaged.*Restore another"):
        zerojax.read_extras(tmp_path / "c")


def rewritten(path, change):
    """The checkpoint with its tree's metadata changed, and checksums to match."""
    file = path / "_METADATA"
    content = json.loads(file.read_text())
    change(content["custom_metadata"]["zerojax"])
    file.write_text(json.dumps(content).replace('"nested"', "[" * 3000 + "]" * 3000))
    (path / "zerojax_checksums.json").unlink()
    _files.write_checksums(epath.Path(path))


def test_extras_that_hold_themselves_are_refused(tmp_path):
    metadata: list = []
    metadata.append(metadata)
    with pytest.raises(ValueError, match=r"rng=, data= or metadata= .*holds itself"):
        zerojax.save(tmp_path / "c", STATE, metadata=metadata)


def test_hostile_extras_are_an_error(tmp_path):
    array = {"zerojax": "array", "dtype": "|O", "shape": [1], "value": "AAAAAAAAAAA="}
    hostile = [
        lambda found: found.update(step="x"),
        lambda found: found.pop("rng"),
        lambda found: found.update(metadata="nested"),
        lambda found: found.update(data=7),
        lambda found: found.update(metadata={"zerojax": "code", "value": "import os"}),
        lambda found: found.update(metadata=array),
        lambda found: found.update(metadata={**array, "dtype": "<f4", "shape": [2**60]}),
        lambda found: found.update(rng={"zerojax": "key", "impl": "no", "value": array}),
    ]
    zerojax.save(tmp_path / "c", STATE)
    whole = (tmp_path / "c" / "_METADATA").read_text()
    for change in hostile:
        rewritten(tmp_path / "c", change)
        with pytest.raises(ValueError, match=r"/c .*(damaged|be read).*Restore another checkpoint"):
            zerojax.read_extras(tmp_path / "c")
        (tmp_path / "c" / "_METADATA").write_text(whole)
    (tmp_path / "c" / "_METADATA").write_text("[" * 10**5)
    (tmp_path / "c" / "zerojax_checksums.json").unlink()
    with pytest.raises(ValueError, match=r"/c cannot be read .*Restore another"):
        zerojax.restore(tmp_path / "c", STATE)


def test_reading_a_checkpoint_runs_no_code_from_it(tmp_path):
    """An audit hook sees every class that an unpickler looks up."""
    state = {"params": {"w": jnp.ones(8)}}
    zerojax.save(tmp_path / "c", state, metadata={"blob": pickle.dumps(pathlib.Path("x"))})
    code = f"""
import sys, jax.numpy as jnp, zerojax
def hook(event, args):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled {{args}}")
sys.addaudithook(hook)
state = zerojax.restore({str(tmp_path / "c")!r}, {{"params": {{"w": jnp.zeros(8)}}}})
blob = zerojax.read_extras({str(tmp_path / "c")!r}).metadata["blob"]
print(float(state["params"]["w"].sum()), type(blob).__name__)
import pickle
try:
    pickle.loads(blob)
except RuntimeError as error:
    print(error)
"""
    root = str(pathlib.Path(zerojax.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert ran.stdout.startswith("8.0 bytes\nunpickled ('pathlib"), ran.stderr
