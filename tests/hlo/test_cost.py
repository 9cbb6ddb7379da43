"""The cost of one instruction: the bytes it touches, and its arithmetic."""

import dataclasses

import pytest

from tests.hlo.modules import ARGUMENTS, LAYER, RATES, SLICE, audited, module

AT_ONCE = dataclasses.replace(RATES, memory=1e30)  # bytes take no time
STACK, ONE = "f32[8,256,256]{2,1,0}", "f32[256,256]{1,0}"


@pytest.mark.parametrize(
    ("instruction", "touched"),
    [
        # The index is 4 bytes more.
        (f"{ONE} fusion(%a, %i), kind=kLoop, calls=%sliced", 2 * LAYER + 4),
        (f"{STACK} fusion(%a, %n, %i), kind=kLoop, calls=%updated", 2 * LAYER + 4),
        ("f32[1,256,256]{2,1,0} dynamic-slice(%a, %i, %i, %i)", 2 * LAYER),
        (f"{STACK} dynamic-update-slice(%a, %n, %i, %i, %i)", 2 * LAYER),
        (f"{STACK} negate(%a)", 16 * LAYER),
        ("f32[2048,256]{1,0} bitcast(%a)", 0),
        (
            f"(({STACK}, s32[]), {ONE}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%sliced",
            2 * LAYER + 4,
        ),
    ],
)
def test_bytes_touched_and_a_launch_for_each_kernel(instruction, touched):
    text = module(f"{ARGUMENTS}  ROOT %out = {instruction}\n", SLICE)
    assert audited(text).replay.compute * RATES.memory == pytest.approx(touched, abs=4)
    launched = dataclasses.replace(RATES, launch=1.0)  # longer than all that these do
    assert audited(text, launched).step_seconds == (1.0 if touched else 0.0)


CUBLAS = (
    'custom-call(%n, %n), custom_call_target="__cublas$gemm"'
    ', backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}'
)
CONVOLUTION = "convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f"


@pytest.mark.parametrize(
    ("instruction", "flops"),
    [
        (f"{STACK} dot(%a, %a), lhs_batch_dims={{0}}, lhs_contracting_dims={{2}}", 16 * 256**3),
        (f"({ONE}, s8[64]{{0}}) {CUBLAS}", 2 * 256**3),
        # 3 x 3 kernels from 16 to 32 features: each output element takes 9 * 16 products.
        (f"f32[4,8,8,32]{{3,2,1,0}} {CONVOLUTION}", 2 * 4 * 8 * 8 * 32 * 9 * 16),
        (f"{STACK} add(%a, %a)", 0),
    ],
)
def test_flops_of_an_instruction(instruction, flops):
    more = "  %x = f32[4,8,8,16]{3,2,1,0} parameter(3)\n  %k = f32[3,3,16,32]{3,2,1,0} parameter(4)"
    replay = audited(module(f"{ARGUMENTS}{more}\n  ROOT %out = {instruction}\n")).replay
    assert replay.flops_by_dtype == ({"f32": flops} if flops else {})


SCORES = 2 * 16 * 2048 * 2048


@pytest.mark.parametrize(
    ("target", "mask", "flops"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 4 * SCORES * 128),
        ("__cudnn$fmhaSoftmax", "PADDING_CAUSAL", 2 * SCORES * 128),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 5 * SCORES * 128),
        ("some_kernel_of_the_users", "CAUSAL", 0),
    ],
)
def test_attention_of_cudnn_costs_its_flops(target, mask, flops):
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", '
        f'"dimensions": ["2", "16", "2048", "2048"]}}, "mask_type": "{mask}"}}}}'
    )
    called = f'custom_call_target="{target}", backend_config={config}'
    result = "(bf16[2,16,2048,128]{3,1,2,0}, f32[2,16,2048]{2,1,0}, u8[0]{0})"
    queries = "\n  %q = bf16[2,2048,16,128]{3,2,1,0} parameter(0)"
    text = module(f"{queries}\n  ROOT %out = {result} custom-call(%q, %q, %q), {called}\n")
    for attention, rate in ((1e13, 1e13), (1e20, RATES.flops)):  # never above that of matmuls
        replay = audited(text, dataclasses.replace(AT_ONCE, attention=attention)).replay
        assert (replay.flops, replay.step) == (flops, pytest.approx(flops / rate))


DOT = "dot(%m, %m), lhs_contracting_dims={1}"
CUBLAS_LT = (
    'custom-call(%m, %m), custom_call_target="__cublas$lt$matmul", backend_config={'
    '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
    '"precision_config":{"operand_precision":["HOW","HOW"],"algorithm":"ALG_UNSET"}}}'
)


@pytest.mark.parametrize(
    ("dtype", "matmul", "rate"),
    [
        ("bf16", f"{DOT}, operand_precision={{highest,highest}}", 4e12),
        ("f8e4m3fn", DOT, 8e12),
        ("f32", DOT, 2e12),
        ("f32", f"{DOT}, operand_precision={{high,high}}", 2e12),
        ("f32", f"{DOT}, operand_precision={{highest,highest}}", 1e12),
        ("f32", f"{DOT}, algorithm=dot_tf32_tf32_f32", 2e12),
        ("f32", f"{DOT}, algorithm=dot_f32_f32_f32", 1e12),
        ("f32", f'{DOT}, metadata={{op_name="highest/dot"}}', 2e12),
        ("f32", CUBLAS_LT.replace("HOW", "DEFAULT"), 2e12),
        ("f32", CUBLAS_LT.replace("HOW", "HIGHEST"), 1e12),
        ("f64", DOT, 1e12),
    ],
)
def test_matmuls_of_eight_bits_are_faster_and_of_float32_slower(dtype, matmul, rate):
    shape = "[256,256]{1,0}"
    text = module(f"\n  %m = {dtype}{shape} parameter(0)\n  ROOT %out = f32{shape} {matmul}\n")
    rates = dataclasses.replace(AT_ONCE, flops=4e12, flops8=8e12, tf32=2e12, fp32=1e12)
    assert audited(text, rates).step_seconds == pytest.approx(2 * 256**3 / rate)
    same = dataclasses.replace(AT_ONCE, flops=4e12)  # where a user gives no more
    assert audited(text, same).step_seconds == pytest.approx(2 * 256**3 / 4e12)


@pytest.mark.parametrize(
    ("left", "right", "rate"),
    [
        ("%m", "%scaled", 8e12),  # as XLA writes scales without a GPU
        ("%scaled", "%scaled", 8e12),
        ("%first", "%scaled", 8e12),  # whose scale comes first
        ("%scaled", "%product", 4e12),  # of two matrices
        ("%wide", "%other", 4e12),  # whose other operand has 16 bits
    ],
)
def test_scaled_float8_multiplies_in_eight_bits(left, right, rate):
    shape = "[256,256]{1,0}"
    text = module(f"""
  %m = f8e4m3fn{shape} parameter(0)
  %other = bf16{shape} parameter(1)
  %scale = bf16[] parameter(2)
  %scales = bf16{shape} broadcast(%scale), dimensions={{}}
  %wide = bf16{shape} convert(%m)
  %scaled = bf16{shape} multiply(%wide, %scales)
  %first = bf16{shape} multiply(%scales, %wide)
  %product = bf16{shape} multiply(%wide, %wide)
  ROOT %out = f32{shape} dot({left}, {right}), lhs_contracting_dims={{1}}
""")
    rates = dataclasses.replace(AT_ONCE, flops=4e12, flops8=8e12)
    assert audited(text, rates).step_seconds == pytest.approx(2 * 256**3 / rate)
