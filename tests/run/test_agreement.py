"""Processes that disagree raise together, and say in what."""

import json
import re

import pytest

from tests.processes import Run
from zerojax._run import agreement as _agreement

DISAGREE = {
    "agreed": "nothing", "alone": "nothing", "kept": "nothing", "after all that": "nothing",
    "stage": "placing a state: .*the stage: 2 in process 0, 3 in process 1",
    "seed": "placing a state: .*how it is made: .*random_seed 0 .*random_seed 1",
    "values": "placing a state: .*the values of params/w: float32.64, 16. of checksum",
    "learning rate": "the step: .*a number in the optimizer's update, such as the learning rate: "
                     "0.01 in process 0, 0.02 in process 1",
    "loss": r"the step: .*the program: .* 1\.0 in process 0.* 2\.0 in process 1",
    "eval": r"eval_step: .*the program: .* 1\.0 in process 0.* 2\.0 in process 1",
    "table": "the step: .*the program: constant float32.64, 16. of checksum",
    "rows": r"shard_batch: .*the rows of one process: float32\[8, 64\] in process 0, .*16, 64",
    "last batch": "nothing",
    "padded alone": "the batch has 3 examples in this process.* may have more or fewer. Pass to=",
    "padded late": "the batch is already on the devices of several.*pass that to zerojax.shard_b",
    "accumulate": "the step: .*accumulate: 1 in process 0, 2 in process 1\nStart all with the same",
    "key": "the step: .*the values of .*: uint32.2. of checksum",
    "version": r"shard_batch: .*the version of JAX: 0\.0\.9 in process 0, 0\.1\.9 in process 1",
    "save": "zerojax.save: .*the directory: .*/0 in process 0, .*/1 in process 1",
    "step": "zerojax.save: .*step: 0 in process 0, 1 in process 1",
    "restore": "zerojax.restore: .*the directory: .*/same in process 0, .*/same1 in process 1\n"
               "  found: True in process 0, False in process 1",
    "like": "zerojax.restore: .*cast: False in process 0, True in process 1",
    "Checkpoints": "Checkpoints: .*every: 1 in process 0, 2 in process 1",
    "Checkpoints.save": "Checkpoints.save: .*step: 2 in process 0, 3 in process 1",
    "unshared": "/proc/self/cwd/c is not one directory: process 1 does not see there .* all hosts",
    "unshared Checkpoints": "/proc/self/cwd/c is not one directory: process 1 does not see there",
    "resume": "Checkpoints.resume: .*step: 1 in process 0, 2 in process 1",
}  # fmt: skip


def test_processes_that_disagree_are_all_told_in_what(tmp_path):
    run = Run(2, tmp_path, ["--directory", str(tmp_path / "d")], "tests.disagreements")
    assert run.wait(120) == [0, 0], run.text()
    first, second = (json.loads((tmp_path / f"d.{number}.json").read_text()) for number in (0, 1))
    assert first == second and first.keys() == DISAGREE.keys()
    for case, pattern in DISAGREE.items():
        assert re.match("ValueError: " * (pattern != "nothing") + pattern, first[case], re.S), (
            case, first[case],
        )  # fmt: skip


def test_what_else_differs_in_an_update_is_shown_as_the_program():
    line = "optimizer v3:float32[4] = {} v1 v2".format
    told = _agreement._difference("the program", line("mul"), line("add"), 0, 1)
    assert told.startswith("the program: optimizer v3:float32[4] = mul")
    assert _agreement._numbers("mul 1e-05 v1", "mul 0.1 v1") == ("1e-05", "0.1")


def test_of_long_texts_the_first_difference_is_shown():
    same = "x" * 1000
    told = _agreement._difference("a", f"1\n{same}2\n3", f"1\n{same}4", 0, 7)
    assert "x2 in process 0, " in told and told.endswith("x4 in process 7") and len(told) < 300
    many = {str(n): "a" for n in range(9)}
    assert "\n  and 4 more\n" in _agreement._message("f", 0, 1, many, {})


def test_one_process_compares_nothing():
    _agreement.agree("f", lambda: pytest.fail("it was asked"))
