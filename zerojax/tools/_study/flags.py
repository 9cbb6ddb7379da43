"""The flags of `zerojax study`."""

import argparse
import pathlib

from zerojax.tools._forecast import flags as _flags, presets as _presets
from zerojax.tools._forecast.memory_table import STAGES
from zerojax.tools._study.cell import LARGEST
from zerojax.tools._study.result import EXPLAINED

TEXT = "forecasts models on several numbers of GPUs: how throughput scales"


def arguments(parser: argparse.ArgumentParser) -> None:
    _flags.explains(parser, EXPLAINED)
    sizes = ", ".join(_presets.PRESETS)
    text = f"by size ({sizes}), or module:function, whose batch is a function of its rows"
    parser.add_argument("models", nargs="+", metavar="model", help=text)
    text = "such as 64xH100 128xH100"
    parser.add_argument("--gpus", nargs="+", required=True, help=text)
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=[1, 2, 3])
    text = "of each GPU: numbers, or largest, as many as fit (default)"
    parser.add_argument("--rows", type=rows, nargs="+", default=[LARGEST], help=text)
    text = "of presets (default %(default)s)"
    parser.add_argument("--remat", default="full", help=text)
    # None leaves both to a step of nnx, which has its own.
    parser.add_argument("--accumulate", type=int)
    _flags.order_argument(parser, default=None)
    text = "keep results in this file of JSON, and do only what is missing there"
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help=text)
    parser.add_argument("--plot", metavar="FILE", help="write a picture")
    _flags.link_arguments(parser)
    _flags.step_arguments(parser)


def rows(text: str) -> int | str:
    return text if text == LARGEST else _flags.positive(text)
