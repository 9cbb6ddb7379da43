"""Buffers that live at the peak of memory."""

from tests.hlo.modules import ARGUMENTS, LAYER, SLICE, module
from zerojax._hlo import liveness as _liveness
from zerojax._hlo.module import Module


def test_buffers_of_asynchronous_fusions_and_copies():
    """The result of a start is one buffer, whichever place it has in the start's type."""
    made = module(
        f"""{ARGUMENTS}
  %s = ((f32[8,256,256]{{2,1,0}}, s32[]), f32[256,256]{{1,0}}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%sliced
  %slice = f32[256,256]{{1,0}} fusion-done(%s)
  %c = (f32[256,256]{{1,0}}, f32[256,256]{{1,0}}, u32[]) copy-start(%slice)
  %copied = f32[256,256]{{1,0}} copy-done(%c)
  %pair = (f32[256,256]{{1,0}}, f32[256,256]{{1,0}}) tuple(%copied, %slice)
  %second = f32[256,256]{{1,0}} get-tuple-element(%pair), index=1
  ROOT %loss = f32[] reduce(%second, %copied), to_apply=%sliced
""",  # noqa: E501
        SLICE,
    )
    live = {(b.name, b.index): b.nbytes for b in _liveness.peak(Module(made))}
    assert {key: size for key, size in live.items() if size > 8} == {
        ("s", 2): LAYER, ("c", 0): LAYER,
    }  # fmt: skip


def test_what_is_updated_in_place_is_one_buffer():
    made = module(
        f"""{ARGUMENTS}
  %copied = f32[8,256,256]{{2,1,0}} copy(%a)
  %put = f32[8,256,256]{{2,1,0}} fusion(%copied, %n, %i), kind=kLoop, calls=%updated
  ROOT %loss = f32[] reduce(%put, %n), to_apply=%sliced
""",
        SLICE,
    )
    live = {b.name: b.nbytes for b in _liveness.peak(Module(made))}
    assert {name: size for name, size in live.items() if size > 8} == {"copied": 8 * LAYER}
