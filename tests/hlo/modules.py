"""Small modules written by hand, and GPUs whose rates are round numbers."""

import dataclasses
import re

import pytest

import zerojax

# Round numbers: 100 TFLOP/s, 1 TB/s of memory, 100 GB/s in a host, 10 GB/s of one card, 1 us to
# start a collective, and no time for its hops.
RATES = zerojax.tools.Rates(
    flops=1e14, memory=1e12, link=1e11, network=1e10, latency=1e-6, launch=0.0
)


def module(entry, before="", devices=16):
    header = f"HloModule tiny, is_scheduled=true, num_partitions={devices}\n"
    return f"{header}{before}\nENTRY %main (a: f32[64,1024]) -> f32[] {{{entry}}}\n"


NOTHING = module("\n  ROOT %nothing = f32[] constant(0)\n")


def gpu_named(name):
    """The facts of a GPU, as an audit has them."""
    return zerojax.audit(NOTHING, gpu=name).gpu


with pytest.raises(ValueError, match=r"no facts about a GPU 'H9'\. Name one of") as said:
    zerojax.tools.rates_of("H9")
GPUS = {name: gpu_named(name) for name in re.findall(r"[\w-]+", str(said.value).split(" of ")[1])}


def audited(text, rates=RATES, per_host=8):
    """The audit of a program on GPUs of these rates."""
    gpu = dataclasses.replace(gpu_named("H100"), given_rates=rates)
    return zerojax.audit(text, gpu=gpu, per_host=per_host)


SLICE = """
%sliced (stack: f32[8,256,256], i: s32[]) -> f32[256,256] {
  %stack = f32[8,256,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,256,256]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,256,256}
  ROOT %flat = f32[256,256]{1,0} bitcast(%one)
}

%updated (stack: f32[8,256,256], new: f32[1,256,256], i: s32[]) -> f32[8,256,256] {
  %stack = f32[8,256,256]{2,1,0} parameter(0)
  %new = f32[1,256,256]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[8,256,256]{2,1,0} dynamic-update-slice(%stack, %new, %i, %zero, %zero)
}
"""  # noqa: E501
ARGUMENTS = """
  %a = f32[8,256,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %n = f32[1,256,256]{2,1,0} parameter(2)
"""
LAYER = 256 * 256 * 4
