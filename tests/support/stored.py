"""Stored programs of two JAX versions and several GPUs: tests of audits and commands read them."""

import pathlib

import zerojax

HERE = pathlib.Path(__file__).parents[1] / "programs"
BF16, F32 = 2, 4  # bytes
LAYER = 256 * 256  # elements of one weight


def stored(name):
    return (HERE / f"{name}.hlo").read_text()


def report(name, **options):
    return zerojax.audit(stored(name), gpu="H100", **options)
