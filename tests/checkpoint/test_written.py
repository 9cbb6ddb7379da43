"""What releases have written opens, bit for bit, on the devices that wrote it and on others."""

import json
import tarfile
import zlib

import jax
import numpy as np
import pytest

import zerojax
from tests.checkpoint import written
from tests.support.reference import assert_equal_bits
from zerojax.checkpoint import read_extras


def cases():
    """Of each archive, the names of its cases, and of what their codes stand for."""
    for path in sorted(written.DATA.glob("written_by_*.tar.xz")):
        with tarfile.open(path) as archive:
            names = [name for name in archive.getnames() if name.endswith(".npz")]
        yield from ((path.name, name.removesuffix(".npz")) for name in sorted(names))


CASES = [(name, case) for name, case in cases() if case in written.CASES]
DECODED = [(name, case) for name, case in cases() if case not in written.CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where each archive lies."""
    found = {}
    for name in dict(CASES):
        found[name] = tmp_path_factory.mktemp("written")
        with tarfile.open(written.DATA / name) as archive:
            archive.extractall(found[name], filter="data")
    return found


def test_0_1_0_has_written_its_checkpoints():
    assert [case for name, case in CASES if "0.1.0" in name] == sorted(written.CASES)
    assert len(DECODED) >= len(written.DECODED)


@pytest.mark.parametrize("devices", [written.DEVICES, 8, 3])
@pytest.mark.parametrize(("archive", "case"), CASES)
def test_what_a_release_wrote_opens_bit_for_bit(folders, archive, case, devices):
    """Padding of other devices is other padding, and is zeros."""
    folder = folders[archive]
    if case == "groups" and devices % 2:
        devices = 6
    like = written.CASES[case](written.mesh_of(case, devices))
    if case == written.IN_A_LOOP:
        with zerojax.Checkpoints(folder / case, best="loss") as checkpoints:
            assert checkpoints.best() == written.STEP
            state, extras = checkpoints.resume(like)
    else:
        state, extras = zerojax.restore(folder / case, like), read_extras(folder / case)
    shardings = zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True)
    assert all(a.sharding == b.sharding and a.dtype == b.dtype for a, b in shardings)
    found = written.bits(state)
    with np.load(folder / f"{case}.npz") as wanted:
        assert found.keys() == set(wanted)
        for name, value in found.items():
            inside = tuple(map(slice, wanted[name].shape))
            np.testing.assert_array_equal(value[inside], wanted[name], err_msg=name, strict=True)
            value = value.copy()
            value[inside] = 0
            assert not value.any(), name
    assert (extras.step, extras.data) == (written.STEP, written.EXTRAS["data"])
    assert extras.metadata == written.EXTRAS["metadata"]
    assert extras.rng == jax.random.key(written.RNG)


@pytest.mark.parametrize(("archive", "case"), DECODED)
def test_codes_mean_what_they_meant(folders, archive, case):
    found = written.bits(written.decoded(folders[archive], case.removesuffix("_decoded")))
    with np.load(folders[archive] / f"{case}.npz") as wanted:
        assert found.keys() == set(wanted)
        for name, value in found.items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name, strict=True)


def as_of(directory, **changed):
    """Writes another format into a checkpoint, with the checksum that goes with it."""
    file = directory / "_METADATA"
    tree = json.loads(file.read_text())
    own = tree["custom_metadata"]["zerojax"]
    own |= changed
    for name in [name for name, value in changed.items() if value is None]:
        del own[name]
    file.write_text(json.dumps(tree))
    sums = directory / "zerojax_checksums.json"
    noted = json.loads(sums.read_text())
    noted["_METADATA"] = [len(file.read_bytes()), zlib.crc32(file.read_bytes())]
    sums.write_text(json.dumps(noted))


def test_later_formats_are_refused_and_earlier_ones_are_read(tmp_path):
    state = {"w": written.PARAMS["w"]}
    zerojax.save(tmp_path / "c", state, step=3)
    noted = json.loads((tmp_path / "c" / "_METADATA").read_text())["custom_metadata"]["zerojax"]
    assert (noted["format"], noted["written_by"]) == (1, zerojax.__version__)
    as_of(tmp_path / "c", format=2, written_by="9.8.7")
    (tmp_path / "c" / "zerojax_checksums.json").write_text("of a later format")
    message = r"/c is a checkpoint of format 2, written by zerojax 9\.8\.7.*Install zerojax 9\.8\.7"
    for read in (lambda path: zerojax.restore(path, state), read_extras):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "c")
    zerojax.save(tmp_path / "d", state, step=3)
    as_of(tmp_path / "d", format=None, written_by=None)  # as before there were numbers
    assert_equal_bits(zerojax.restore(tmp_path / "d", state), state)
    assert read_extras(tmp_path / "d").step == 3
