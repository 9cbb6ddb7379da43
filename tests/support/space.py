"""The space of steps: features, their levels, what is refused, and rows that have every pair.

    python tests/support/space.py           # all rows, and how many pairs each is the first to have
    python tests/support/space.py 17        # a row, these pairs, and the program of its step
    python tests/support/space.py 7-113     # a row of `make fuzz SEED=7 FIRST=113 COUNT=1`

Beside the pairs, each level is wanted in a row that rounds nothing: with precision='' and codes=''.
`tests/test_pairs.py` compares each row with one device.
"""

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import random
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# -- a row


@dataclasses.dataclass(frozen=True)
class Row:
    """One step, by its level of each feature; the default is the first level."""

    model: str = "gpt"
    remat: bool = False
    shapes: str = "even"
    layout: str = "data=3"
    sequence: str = ""  # split over the axis of the fast links, or of the slow ones
    experts: str = ""  # apart over the axis of the fast links, or of the slow ones
    stage: int = 3
    optimizer: str = "adamw"
    precision: str = ""
    codes: str = ""
    accumulate: int = 1
    order: str = "microbatches"
    regather: bool | str = True
    prefetch: int = 0
    keep_layers: int = 1
    roll: bool | str = True
    offload: tuple[str, ...] = ()
    update: str = "auto"
    activations: str | None = None
    masked: bool = False  # zerojax.mean, with rows that do not count
    noisy: bool = False  # dropout
    fields: bool = False  # statistics that the loss updates
    donate: bool = True
    skip: bool = False  # what is not finite
    packed: str = ""  # the codes in which frozen matrices rest
    replayed: int = 0  # every so many steps run twice
    explicit: bool = False  # axes of the mesh
    source: str = "arrays"  # of the state: trained ones, a function, a checkpoint of another row

    def __str__(self) -> str:
        """As Python that makes it, with what is not the default."""
        levels, plain = dataclasses.asdict(self), dataclasses.asdict(Row())
        return f"Row({', '.join(f'{k}={v!r}' for k, v in levels.items() if v != plain[k])})"

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh: of each axis its number of devices."""
        return {axis: int(text.split("/")[0]) for axis, text in settings(self.layout).items()}

    @property
    def kinds(self) -> dict[str, int]:
        """Of each axis, over how many kinds of arrays it may shard."""
        return {axis: int(text[2:] or 3) for axis, text in settings(self.layout).items()}

    @property
    def tokens(self) -> str | None:
        """The axis that splits sequences. The others split rows."""
        return self._axis(self.sequence)

    @property
    def apart(self) -> str | None:
        """The axis over which experts are apart. It splits rows, too."""
        return self._axis(self.experts)

    def _axis(self, where: str) -> str | None:
        slowest, *_, fastest = [*self.sizes] * 2
        return {"": None, "far": slowest, "near": fastest}[where]

    @property
    def parts(self) -> int:
        """Into how many parts devices and microbatches split the rows of a batch."""
        sizes = (size for axis, size in self.sizes.items() if axis != self.tokens)
        return math.prod(sizes) * self.accumulate

    @property
    def types(self) -> dict[str, str]:
        """What `zerojax.Precision` is given."""
        return settings(self.precision) | settings(self.codes)


def settings(text: str) -> dict[str, str]:
    return dict(one.split("=") for one in text.split())


# -- the space

# "node=2/1 gpu=3/3" is a mesh of 2 x 3 devices. As far as the stage shards them, one kind of arrays
# is sharded over `node`, the optimizer state, and all three over `gpu`: gradients and parameters
# too. The axis of the fast links is the last one.
REPLICATED = "node=2/0 gpu=2/3"
INT4 = "reduce=int4 gather=float8_e4m3fn"
NARROW = "compute=bfloat16 param=bfloat16"
MASTERS, SPLIT = f"{NARROW} master=float32", f"{NARROW} master=split"
SEVEN = f"{SPLIT} moments=int8"
BOTH = ("opt_state", "params")

Factors = dict[str, tuple[Any, ...]]  # the levels of each feature
FACTORS: Factors = {
    "model": ("gpt", "linen", "mlp", "convnet", "nnx", "equinox"),
    "remat": (False, True),
    "shapes": ("even", "padded", "whole"),  # which devices divide; or do not, with pad=False
    "layout": (
        "data=3",
        "node=2 gpu=2",
        REPLICATED,
        "node=2/1 gpu=3/3",
        "node=2/3 gpu=2/1",
        "rack=2/2 node=2/1 gpu=2/3",
    ),
    "sequence": ("", "near", "far"),
    "stage": (3, 2, 1, 0),
    "optimizer": ("adamw", "adafactor", "muon", "several", "wrapped", "frozen"),
    "precision": ("", "compute=bfloat16", MASTERS, "moments=bfloat16"),
    "codes": ("", "reduce=int8", "gather=int8", INT4, "reduce=bfloat16 gather=bfloat16"),
    "accumulate": (1, 2, 4),
    "order": ("microbatches", "layers"),
    "regather": (True, False, "near"),
    "prefetch": (0, 1),
    "keep_layers": (1,),
    "roll": (True, False, "auto"),
    "offload": ((), ("opt_state",), BOTH),
    "update": ("auto", "backward"),
    "activations": (None, "host"),
    "masked": (False, True),
    "noisy": (False, True),
    "fields": (False, True),
    "donate": (True, False),
    "skip": (False, True),
    "source": ("arrays", "function", "saved flat", "saved in groups"),
}
# Of these rows, each has experts apart, and a pair of that with each other level.
APART = FACTORS | {"model": ("mixture",), "experts": ("near", "far")}
LOOPLESS, SEVERAL = ("mlp", "convnet"), (2, 4)


class Refusal(NamedTuple):
    """Levels that no step has together: zerojax says so before anything compiles."""

    levels: dict[str, tuple[Any, ...]]
    says: str


IN_BACKWARD = r"update='backward', and no parameter can be updated there"
REFUSED = (
    Refusal({"update": ("backward",), "model": (*LOOPLESS, "linen")}, IN_BACKWARD),
    Refusal(
        {
            "update": ("backward",),
            "optimizer": ("adafactor", "wrapped", "clipped", "lamb", "novograd"),
        },
        IN_BACKWARD,
    ),
    Refusal(  # stacks are padded; of the vectors in stacks, muon makes matrices
        {
            "update": ("backward",),
            "shapes": ("padded",),
            "stage": (3, 2, 1),
            "optimizer": ("muon", "frozen"),
        },
        IN_BACKWARD,
    ),
    Refusal(
        {"update": ("backward",), "order": ("microbatches",), "accumulate": SEVERAL},
        r"update='backward'.*accumulate=\d needs all gradients first",
    ),
    Refusal(  # corrections of 8 bits; moments alone leave vectors, which are updated
        {"update": ("backward",), "precision": (SEVEN, SPLIT), "offload": (("opt_state",), BOTH)},
        f"{IN_BACKWARD}.*it is quantized in host memory",
    ),
    Refusal({"update": ("backward",), "regather": (False,)}, r"'backward'.*regather=False needs"),
    Refusal({"update": ("backward",), "skip": (True,)}, r"'backward'.*skips what is not finite"),
    Refusal(
        {"codes": ("reduce=int8", INT4), "layout": (REPLICATED,)},
        r"reduce=.*quantizes gradients sent between nodes, and groups= shards nothing over "
        r"\('node',\)",
    ),
)
REFUSED += (
    Refusal(
        {"experts": ("near", "far"), "model": FACTORS["model"]},
        r"experts= has the path pattern 'experts', which matches no parameter",
    ),
    Refusal(
        {"experts": ("near", "far"), "shapes": ("whole",), "model": ("mixture",)},
        r"experts= splits the 11 experts of .* which do not divide them",
    ),
    *(
        Refusal({"experts": a, "sequence": b, **where, "model": ("mixture",)}, r"the same axis")
        for a, b, where in (
            (("near",), ("near",), {}),
            (("far",), ("far",), {}),
            (("near",), ("far",), {"layout": ("data=3", "data=8")}),
            (("far",), ("near",), {"layout": ("data=3", "data=8")}),
        )
    ),
)

# Levels of which a step runs without the first, and says so.
LEFT_OUT = (
    Refusal(
        {"order": ("layers",), "model": LOOPLESS, "accumulate": SEVERAL},
        r"order='layers' is left out: the loss has no scan over stacked parameters",
    ),
    Refusal(
        {"activations": ("host",), "model": LOOPLESS},
        r"activations=\('host',\) is left out: the loss has no scan of stacked parameters",
    ),
    *(
        Refusal({"model": ("linen",), **option, **stays}, says)
        for option, says in (
            ({"order": ("layers",), "accumulate": SEVERAL}, r"order='layers'.*has no scan"),
            ({"activations": ("host",)}, r"activations=\('host',\).*has no scan"),
        )
        for stays in (
            {"roll": (False, "auto")},
            {"stage": (2, 1, 0)},
            {"offload": (BOTH,)},
            {"optimizer": ("frozen",)},  # other parameters of each layer
        )
    ),
)

EXACT = {"precision": "", "codes": ""}
ROLLED = {"model": "linen", "stage": 3, "roll": True}
KEPT = {"model": "gpt", "stage": 3, "prefetch": 1, "regather": True}
# What has failed, though no pair of it had; and what FACTORS does not have.
TOGETHER: tuple[dict[str, Any], ...] = (
    {"codes": "reduce=int8", "layout": "node=2/3 gpu=2/1", "stage": 2},
    {"codes": "reduce=int8", "layout": "node=2/3 gpu=2/1", "stage": 3, "accumulate": 2},
    {"codes": "reduce=int8", "layout": "rack=2/2 node=2/1 gpu=2/3", "stage": 2},
    {"shapes": "padded", "model": "gpt", "optimizer": "frozen"},
    {"shapes": "padded", "model": "mlp", "optimizer": "adafactor", "stage": 3},
    {"shapes": "padded", "offload": BOTH, "stage": 1, "accumulate": 2},
    {"offload": BOTH, "update": "backward", "order": "layers", "accumulate": 4},
    {"offload": BOTH, "update": "backward", "precision": MASTERS},
    {"noisy": True, "model": "linen", "stage": 3, "accumulate": 4},
    {"noisy": True, "stage": 0, "accumulate": 2},
    {"masked": True, "layout": "node=2/1 gpu=3/3", "accumulate": 4},
    {"masked": True, "layout": REPLICATED, "accumulate": 2},
    {"fields": True, "order": "layers", "accumulate": 2},
    {"regather": False, "activations": "host", "prefetch": 1},
    {**KEPT, "keep_layers": 2, "activations": "host", "codes": "gather=int8"},
    {**KEPT, "keep_layers": 9, "update": "backward", "regather": "near", "layout": "node=2 gpu=2"},
    {**ROLLED, **EXACT, "noisy": True, "fields": True, "masked": True, "accumulate": 2},
    {**ROLLED, "remat": True, "roll": "auto", "shapes": "padded", "codes": "gather=int8"},
    {**ROLLED, "order": "layers", "accumulate": 4, "layout": "node=2/3 gpu=2/1", "noisy": True},
    {**ROLLED, "activations": "host", "prefetch": 1, "codes": "reduce=int8"},
    {**ROLLED, "remat": True, "prefetch": 1, "precision": MASTERS, "offload": ("opt_state",)},
    {**ROLLED, "regather": "near", "layout": "node=2/1 gpu=3/3", "optimizer": "muon", **EXACT},
    {**ROLLED, "regather": False, "layout": "node=2 gpu=2", "skip": True, "optimizer": "frozen"},
    {"skip": True, "codes": "reduce=int8", "offload": ("opt_state",)},
    {"layout": "node=2/2 gpu=2/3", "codes": "gather=int8", "prefetch": 1},
    {"layout": "data=1", "optimizer": "lion", **EXACT},
    {"layout": "data=8", "optimizer": "momentum", **EXACT},
    {"layout": "data=5", "optimizer": "novograd", **EXACT},
    {"optimizer": "lamb", **EXACT},
    {"optimizer": "scheduled", **EXACT},
)


# -- rows that have every pair

# A row that has its pairs with any level of these has the first: exact, and compiled soonest.
PLAIN = {"precision", "codes", "offload", "update", "source"}
TRIES = 20
Levels = dict[str, Any]  # of some features, or of all
Group = frozenset[tuple[str, Any]]  # of levels


EVERY = REFUSED + LEFT_OUT
NAMING = {name: tuple(one for one in EVERY if name in one.levels) for name in FACTORS | APART}


def refusal_of(levels: Levels, among: tuple[Refusal, ...] = EVERY) -> Refusal | None:
    has = lambda refusal: all(levels.get(name, ...) in of for name, of in refusal.levels.items())
    return next(filter(has, among), None)


def groups_of(levels: Levels) -> set[Group]:
    """The pairs of a row; and, where nothing is rounded, each level beside that."""
    pairs = set(map(frozenset, itertools.combinations(levels.items(), 2)))
    is_exact = EXACT.items() <= levels.items()
    return pairs | {frozenset({level, *EXACT.items()}) for level in levels.items() if is_exact}


def wanted() -> dict[Group, None]:
    """What rows are to have: each level where nothing is rounded, and every pair."""
    every = [(name, level) for name, levels in FACTORS.items() for level in levels]
    groups = [frozenset({level, *EXACT.items()}) for level in every if level[0] not in EXACT]
    groups += [frozenset({a, b}) for a, b in itertools.combinations(every, 2) if a[0] != b[0]]
    return dict.fromkeys(group for group in groups if not refusal_of(dict(group)))


def wanted_apart() -> dict[Group, None]:
    """What rows with experts apart are to have: that on each axis, with each other level."""
    every = [(name, level) for name, levels in APART.items() for level in levels]
    sides = [("experts", level) for level in APART["experts"]]
    groups = [frozenset({side, other}) for side in sides for other in every]
    is_some = lambda group: len(group) == 2 and len(dict(group)) == 2
    mixture = {"model": "mixture"}
    return dict.fromkeys(g for g in groups if is_some(g) and not refusal_of(mixture | dict(g)))


def _completed(
    levels: Levels, left: dict[Group, None], rng: random.Random, factors: Factors = FACTORS
) -> Levels | None:
    """A row that begins with these levels; each of the others adds the most pairs that are left."""

    def gained(name: str, level: Any) -> int:
        return sum(frozenset({(name, level), item}) in left for item in levels.items())

    # What refuses one more level names its feature, unless these are refused already.
    refusals = {} if refusal_of(levels) else NAMING
    # Those of many levels first, in about that order.
    for name in sorted(factors, key=lambda name: 3 * rng.random() - len(factors[name])):
        fits = lambda level: not refusal_of(levels | {name: level}, refusals.get(name, EVERY))
        among = list(filter(fits, factors[name]))
        if name not in PLAIN:
            rng.shuffle(among)
        if name not in levels:
            if not among:
                return None
            levels = levels | {name: max(among, key=functools.partial(gained, name))}
    return levels


def _hardest(left: dict[Group, None]) -> Levels:
    """Of what is left, the group of those levels that the most others have, too."""
    counts = collections.Counter(itertools.chain.from_iterable(left))
    return dict(max(left, key=lambda group: sum(counts[level] for level in group)))


@functools.cache
def rows() -> tuple[Row, ...]:
    """By a greedy search: of some completions of a start, the one that has most of what is left.
    What has failed together starts a row with as much else of that as it can have."""
    return *_rows(FACTORS, wanted(), TOGETHER), *_rows(APART, wanted_apart())


def _rows(
    factors: Factors, left: dict[Group, None], starts: Iterable[Levels] = ()
) -> Iterator[Row]:
    rng, starts = random.Random(5), list(starts)
    while starts or left:
        start = starts.pop(0) if starts else _hardest(left)
        for other in [*starts]:
            both = start | other
            if start.items() <= both.items() and _completed(both, left, rng, factors):
                start = both
                starts.remove(other)
        tried = filter(None, [_completed(start, left, rng, factors) for _ in range(TRIES)])
        best = max(tried, key=lambda levels: len(groups_of(levels) & left.keys()))
        yield Row(**best)
        for group in groups_of(best):
            left.pop(group, None)


@functools.cache
def verified() -> tuple[int, ...]:
    """The numbers of some rows that have each level once."""
    left = {(name, level) for name, levels in FACTORS.items() for level in levels}
    worth = lambda number: len(left & levels[number]) / costs[number]
    costs = [1.5 if row.model == "linen" else 1 for row in rows()]  # its programs are the largest
    levels = [set(dataclasses.asdict(row).items()) for row in rows()]
    found = []
    while left:
        found.append(max(range(len(levels)), key=worth))
        left -= levels[found[-1]]
    return tuple(found)


# -- rows at random

RARE: dict[str, tuple[Any, ...]] = {
    "model": ("chunks",),
    "optimizer": ("clipped", "lion", "lamb", "momentum", "novograd", "scheduled"),
    "precision": (SEVEN, SPLIT, "moments=int8", f"{SPLIT} moments=bfloat16"),
    "source": ("saved wide", "saved in codes"),
}
CHAINS = tuple(
    " ".join(f"{axis}/{kind}" for axis, kind in zip(mesh.split(), kinds, strict=True))
    for mesh in ("data=8", "node=2 gpu=4", "rack=2 node=2 gpu=2")
    for kinds in itertools.product(range(4), repeat=mesh.count("="))
)


def walk(seed: int, number: int) -> Row:
    """The first have each mesh and all groups over it, with gradients as codes."""
    rng = random.Random(f"{seed}-{number}")
    others = RARE | {"layout": CHAINS}
    levels = {
        name: rng.choice(of + others.get(name, ())) if rng.random() < 0.4 else of[0]
        for name, of in FACTORS.items()
    }
    if levels["prefetch"] and levels["regather"]:
        levels["keep_layers"] = rng.choice((1, 2, 9))
    if levels["model"] == "linen":  # where parameters are whole, no layers are rolled up
        levels |= {"order": "microbatches", "activations": None}
    if rng.random() < 0.2:  # blocks of 4 bits are even
        kinds = ("nf4", "int4", "int8") if levels["shapes"] == "even" else ("int8",)
        levels |= {"optimizer": "frozen", "packed": rng.choice(kinds)}
    if levels["optimizer"] == "frozen" and "param" not in levels["precision"]:
        levels["source"] = levels["source"].replace("in codes", "flat")  # those are rounded
    if number < len(CHAINS):
        levels |= {"layout": CHAINS[number], "codes": "reduce=int8"}
    if rng.random() < 0.1:  # a second program; a row takes two or three steps
        levels["replayed"] = rng.choice((1, 2))
    levels["explicit"] = rng.random() < 0.15
    if rng.random() < 0.2:
        levels |= {"model": "mixture", "experts": rng.choice(APART["experts"])}
    return Row(**levels)


# -- the command line


def main(which: str = "") -> None:
    is_drawn = re.fullmatch(r"\d+-\d+", which)
    if which and not is_drawn and which not in map(str, range(len(rows()))):
        sys.exit(
            f"there is no row {which!r}: pass one of 0 to {len(rows()) - 1}, or SEED-NUMBER for a "
            "row of `make fuzz`"
        )
    left = wanted() | wanted_apart()
    pairs = sum(len(group) == 2 for group in left)
    for number, row in enumerate(rows()):
        first = groups_of(dataclasses.asdict(row)) & left.keys()
        left = {group: None for group in left if group not in first}
        if not which:
            print(f"{number:3}{len(first):5} first  {row}")
        elif which == str(number):
            texts = (", ".join(sorted(f"{name}={level!r}" for name, level in g)) for g in first)
            print(*sorted(texts), sep="\n")
    if which:
        from tests.support.compared import compiled

        row = walk(*map(int, which.split("-"))) if is_drawn else rows()[int(which)]
        print(row, flush=True)  # of a row that zerojax refuses, an error comes next
        print("", compiled(row), sep="\n")
    else:
        print(f"{len(rows())} rows have {pairs} pairs; zerojax refuses all others")


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from tests import conftest  # noqa: F401 the first has JAX emulate devices
    from tests.support import space

    space.main(*sys.argv[1:])
