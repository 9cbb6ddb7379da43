"""When a step gathers weights, runs microbatches and layers, and updates: `zerojax.Schedule`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax._declared import Options, check_count, described, option
from zerojax._specs import as_names

ORDERS = MICROBATCHES, LAYERS = "microbatches", "layers"  # what runs first
WHEN = ("backward", "after", "auto")  # parameters are updated


def regathered(given: object) -> bool | tuple[str, ...]:
    """Returns `regather=`, the names of mesh axes as a tuple."""
    if isinstance(given, bool):
        return given
    if not (names := as_names(given)):
        raise TypeError(
            f"regather={given!r} must be True or False, or name the mesh axes over which backward "
            "gathers weights again: regather='gpu'."
        )
    return names


def activation_names(given: object) -> tuple[str, ...]:
    """Returns the names in `activations=`."""
    names = () if given is None else as_names(given)
    if names is None:
        raise TypeError(
            f"activations={given!r} does not say where they are kept. Pass 'host', the name of a "
            "mesh axis such as 'tensor', or both: ('host', 'tensor')."
        )
    return names


def _one_of(name: str, *values: object, about: str = "") -> Callable[[Any], Any]:
    """Returns the check of an option that has one of a few values; `about` says what they are."""

    def check(value: object) -> object:
        if value not in values:
            *others, last = map(repr, values)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}{about}.")
        return value

    return check


def _compiler_options(options: object) -> object:
    if not isinstance(options, Mapping | None):
        raise TypeError(
            f"compiler_options={options!r} must be a dict of XLA's options, as jax.jit takes it."
        )
    return options


@described
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(Options):
    """When a step gathers weights, runs microbatches and layers, and updates parameters. Numbers
    do not depend on it; memory and time do. "auto" leaves a decision to the step.

    Arguments:
        {options}

    Example:
        >>> schedule = zerojax.Schedule(order="layers", prefetch=True)
        >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> step = zerojax.train_step(loss, accumulate=4, schedule=schedule)
        >>> print(step.recipe.options.schedule)
        zerojax.Schedule(order="layers", prefetch=True)
    """

    order: str = option(
        MICROBATCHES,
        """"microbatches", one after another; or "layers", in which all microbatches go through a
        layer before the next, so that weights are gathered and gradients reduced once a step.""",
        check=_one_of(
            "order", *ORDERS, about=": whether microbatches run one by one, or layer by layer"
        ),
        flag={"choices": ORDERS},
    )
    regather: bool | str | Sequence[str] = option(
        True,
        """gather weights again in backward instead of keeping them (stage 3). An axis, such as
        "gpu", gathers them again over that axis only: what forward gathered over the others,
        between nodes, is kept in shards (ZeRO++'s hpZ).""",
        check=regathered,
    )
    prefetch: bool | str = option(
        "auto",
        """gather the weights of a `scan`'s next layer while this one computes, in both directions:
        True, False, or "auto", which is True on GPUs. It costs the memory of one layer. The step
        then also keeps for backward the weights that forward reads last, a head.""",
        check=_one_of("prefetch", "auto", True, False, about=": whether to gather a layer ahead"),
    )
    keep_layers: int = option(
        1,
        """number of last layers of each `scan` whose gathered weights stay for backward, which does
        not gather them again (stage 3): memory for bytes, where links are slow and batches small.
        A `scan` that prefetches keeps one layer anyway; one that keeps more prefetches.""",
        check=functools.partial(
            check_count,
            name="keep_layers",
            what="the number of last layers whose gathered weights stay for backward",
        ),
        flag={"type": int},
    )
    activations: str | Sequence[str] = option(
        (),
        """where the activations that a `scan` keeps of each layer wait for backward: "host", in
        host memory, a mesh axis such as "tensor", in parts over it, or both. With `jax.checkpoint`
        around the layer they are its input, without it all that JAX keeps.""",
        check=activation_names,
    )
    roll: bool | str = option(
        "auto",
        """run layers of a Python loop that are alike as one loop over stacks of their shards, as a
        `scan` runs (stage 3): "auto", where `jax.checkpoint` is around each layer; True, also where
        it is not, which takes less memory and more time; False, nowhere. The state stays as it
        is.""",
        check=_one_of("roll", "auto", True, False, about=": whether layers become one loop"),
    )
    update: str = option(
        "auto",
        """when parameters are updated: "after" backward, or in "backward", layer by layer, so that
        no gradients are kept. The latter takes one microbatch or order="layers", a stack that one
        `scan` reads, and an optimizer that treats each element by itself (Adam; not clipping by the
        global norm). The step updates all other parameters after backward. "auto": in backward on
        GPUs, for state in host memory, or where weights are stored whole.""",
        check=_one_of("update", *WHEN),
        flag={"choices": WHEN},
    )
    compiler_options: Mapping[str, int | bool | str] | None = option(
        None,
        "as in `jax.jit`; they override those that the step chooses on GPUs and TPUs.",
        check=_compiler_options,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_layers > 1 and not self.prefetch:
            raise ValueError(
                f"keep_layers={self.keep_layers} is for scans that gather ahead, and "
                "prefetch=False turns that off. Leave prefetch= out."
            )
        if self.keep_layers > 1 and not self.regather:
            raise ValueError(
                f"keep_layers={self.keep_layers} keeps the gathered weights of so many layers, and "
                "regather=False those of all. Leave one of them out."
            )

    def __hash__(self) -> int:
        return hash((*{**vars(self), "compiler_options": None}.values(),))  # that is a dict

    def __repr__(self) -> str:
        changed = []
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
                text = repr(value) if isinstance(value, Mapping) else repr(value).replace("'", '"')
                changed.append(f"{field.name}={text}")
        return f"zerojax.Schedule({', '.join(changed)})"


def unordered(schedule: Schedule) -> Schedule:
    """Returns what is left of a schedule where a step has one microbatch."""
    return dataclasses.replace(schedule, order=MICROBATCHES)


NO_GRADIENTS = Schedule(regather=False, roll=False, update="after")


def check_schedule(schedule: object) -> Schedule:
    if not isinstance(schedule, Schedule):
        said = schedule if schedule in (*ORDERS, *WHEN) else LAYERS
        field = "order" if said in ORDERS else "update"
        raise TypeError(
            f"schedule={schedule!r} must be a zerojax.Schedule, such as "
            f"zerojax.Schedule({field}={said!r})."
        )
    return schedule
