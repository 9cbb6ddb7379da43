"""Step, key, data and metadata are saved with a state, as data that runs no code."""

import json
import os
import pickle

import jax
import numpy as np
import pytest

import zerojax
from tests.checkpoint.damage import files_of
from tests.checkpoint.states import STATE, words
from tests.support.reference import assert_equal_bits


class Iterator:
    def get_state(self):
        return b"\x00at 12"


class Attack:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_step_rng_data_and_metadata_are_read_without_the_state(tmp_path):
    """A pickle among them stays bytes."""
    blob = pickle.dumps(Attack(str(tmp_path / "attacked")))
    metadata = {"run": "a", "lr": 1e-3, "shape": (2, [3]), "none": None, "blob": blob}
    mean = np.arange(3, dtype=np.float16)
    options = {"step": 12, "rng": jax.random.key(3, impl="rbg"), "data": Iterator()}
    zerojax.save(tmp_path / "c", STATE, metadata=metadata | {"mean": mean}, **options)
    for file in files_of(tmp_path / "c" / "ocdbt.process_0"):
        file.write_bytes(b"of no use")
    extras = zerojax.checkpoint.read_extras(tmp_path / "c")
    assert (extras.step, extras.data) == (12, b"\x00at 12")
    assert extras.rng.dtype == options["rng"].dtype
    assert_equal_bits(words([extras.rng]), words([options["rng"]]))
    read = extras.metadata.pop("mean")
    assert extras.metadata == metadata and read.dtype == mean.dtype
    assert_equal_bits(read, mean)
    assert zerojax.checkpoint.read_extras(tmp_path / "c", data=False).data is None
    assert not (tmp_path / "attacked").exists()
    pickle.loads(blob)
    assert (tmp_path / "attacked").exists(), "it would have been seen"


ARRAY = {"zerojax": "array", "dtype": "|O", "shape": [1], "value": "AAAAAAAAAAA="}
HOSTILE = [
    {"step": "x"},
    {"rng": ...},  # left out
    {"metadata": "nested"},
    {"data": 7},
    {"metadata": {"zerojax": "code", "value": "import os"}},
    {"metadata": ARRAY},
    {"metadata": {**ARRAY, "dtype": "<f4", "shape": [2**60]}},
    {"rng": {"zerojax": "key", "impl": "no", "value": ARRAY}},
]


def test_hostile_extras_are_an_error(tmp_path):
    zerojax.save(tmp_path / "c", STATE)
    file = tmp_path / "c" / "_METADATA"
    whole = file.read_text()
    (tmp_path / "c" / "zerojax_checksums.json").write_text("{}")  # takes the files as they are
    for change in HOSTILE:
        content = json.loads(whole)
        extras = content["custom_metadata"]["zerojax"] | change
        content["custom_metadata"]["zerojax"] = {k: v for k, v in extras.items() if v is not ...}
        file.write_text(json.dumps(content).replace('"nested"', "[" * 3000 + "]" * 3000))
        with pytest.raises(ValueError, match=r"/c .*(damaged|be read).*Restore another checkpoint"):
            zerojax.checkpoint.read_extras(tmp_path / "c")
    file.write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"/c cannot be read .*Restore another"):
        zerojax.restore(tmp_path / "c", STATE)
