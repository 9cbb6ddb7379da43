"""The dimensions along which an operation treats elements alike."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from zerojax._jaxprs import ELEMENTWISE, Eqn, primitives, type_of
from zerojax._types import Shape

BY_ELEMENT = ELEMENTWISE | primitives("""
bessel_i0e bessel_i1e clz complex igamma igamma_grad_a igammac name one_minus_square
polygamma random_gamma_grad regularized_incomplete_beta reshard threefry2x32 zeta
""")
# Of collectives, those that leave elements at their places.
IN_PLACE = primitives("psum psum_invariant pmax pmin ppermute pvary pcast")
SCATTERS = primitives("scatter scatter-add scatter-mul scatter-min scatter-max")


def parallel(eqn: JaxprEqn) -> list[dict[int, int]]:
    """Returns, for each operand, which of its dimensions become which of the results', with each
    element along them on its own. None of an unknown operation do."""
    shapes = [type_of(v).shape for v in eqn.invars]
    out = type_of(eqn.outvars[0]).shape if eqn.outvars else ()
    name, params = eqn.primitive.name, Eqn(eqn)
    ranks = list(map(len, shapes))

    def but(*dims: int) -> list[dict[int, int]]:
        return [{d: d for d in range(rank) if d not in dims} for rank in ranks]

    if name in BY_ELEMENT:  # dimensions of length 1 are repeated
        return [
            {d: d for d, (n, m) in enumerate(zip(shape, out, strict=False)) if n == m}
            for shape in shapes
        ]
    if name.startswith("cum") or name in ("split", "top_k"):
        return but(params.axis % ranks[0])
    if (axes := params.reduced) is not None:
        kept = [d for d in range(ranks[0]) if d not in axes]
        return [{d: i for i, d in enumerate(kept)} for _ in shapes]
    if name in ("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"):
        return but(ranks[0] - 1, ranks[0] - 2)
    maps: list[dict[int, int]] = [{} for _ in shapes]
    match name:
        case "sort" | "concatenate":
            return but(params.dimension)
        case "rev":
            return but(*params.dimensions)
        case "fft":
            return but(*range(ranks[0] - len(params.fft_lengths), ranks[0]))
        case "stack":
            return [{d: d + (d >= params.axis) for d in range(rank)} for rank in ranks]
        case "dynamic_update_slice":
            pairs = enumerate(zip(shapes[0], shapes[1], strict=True))
            maps[0] = maps[1] = {d: d for d, (old, new) in pairs if old == new}
        case "dot_general":
            return _of_matmul(eqn, ranks)
        case "conv_general_dilated" if params.batch_group_count == 1:
            lhs, _, spec = params.dimension_numbers
            maps[0] = {lhs[0]: spec[0]}
        case "gather":
            numbers = params.dimension_numbers
            batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
            window = numbers.collapsed_slice_dims, numbers.offset_dims
            maps[0], rows = _of_window(*window, *batching, shapes[0], out)
            maps[1] = dict(enumerate(rows))
        case _ if name in SCATTERS:
            numbers = params.dimension_numbers
            batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
            window = numbers.inserted_window_dims, numbers.update_window_dims
            updates, _ = _of_window(*window, *batching, shapes[0], shapes[2])
            maps = [{d: d for d in updates}, dict(zip(*batching[::-1], strict=True))]
            maps.append({row: d for d, row in updates.items()})
        case _ if shapes:
            maps[0] = _of_view(eqn, shapes[0], out)
        case _:
            pass
    return maps


def _of_matmul(eqn: JaxprEqn, ranks: Sequence[int]) -> list[dict[int, int]]:
    (cx, cy), (bx, by) = Eqn(eqn).factors
    free = [d for d in range(ranks[0]) if d not in (*cx, *bx)]
    others = [d for d in range(ranks[1]) if d not in (*cy, *by)]
    after = range(ranks[0] - len(cx), ranks[0] - len(cx) + len(others))
    left = {d: i for i, d in enumerate([*bx, *free])}
    return [left, {d: i for i, d in enumerate(by)} | dict(zip(others, after, strict=True))]


def _of_view(eqn: JaxprEqn, shape: Shape, out: Shape) -> dict[int, int]:
    """Of what only moves, repeats or leaves out elements."""
    params = Eqn(eqn)
    match eqn.primitive.name:
        case "broadcast_in_dim":
            pairs = enumerate(params.broadcast_dimensions)
            return {i: d for i, d in pairs if shape[i] == out[d]}
        case "transpose":
            return {d: i for i, d in enumerate(params.permutation)}
        case "squeeze":
            kept = [d for d in range(len(shape)) if d not in params.dimensions]
            return {d: i for i, d in enumerate(kept)}
        case "slice" | "dynamic_slice" | "tile":
            return {d: d for d, n in enumerate(shape) if n == out[d]}
        case "unstack":
            return {d: d - (d > params.axis) for d in range(len(shape)) if d != params.axis}
        case "pad":
            same = enumerate(params.padding_config)
            return {d: d for d, config in same if config == (0, 0, 0)}
        case _:
            return {}


def _of_window(
    inserted: Sequence[int],
    window: Sequence[int],
    batching: Sequence[int],
    of_index: Sequence[int],
    shape: Shape,
    part: Shape,
) -> tuple[dict[int, int], list[int]]:
    """Returns which dimensions of an operand become which of what a gather reads of it, or a
    scatter puts into it, and there the ones that indices have."""
    rows = [d for d in range(len(part)) if d not in window]
    inside = [d for d in range(len(shape)) if d not in (*inserted, *batching)]
    dims = {d: w for d, w in zip(inside, window, strict=True) if shape[d] == part[w]}
    return dims | {d: rows[i] for d, i in zip(batching, of_index, strict=True)}, rows
