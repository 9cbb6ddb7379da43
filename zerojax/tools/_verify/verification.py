"""The result of `zerojax.verify`, and how it prints."""

import dataclasses

from zerojax import _table
from zerojax.tools._verify.compare import NOT_FINITE, UNSEEN, Check

ROWS_SHOWN = 12


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of `zerojax.verify`; print it to see.

    `losses` are the step's, the mean over the parts of the batch on one device, and that of the
    whole batch at once; `checks` has one for each leaf, worst first; `causes` says what is likely
    wrong and how to fix it; `notes` what could not be compared.
    """

    losses: dict[str, float]
    checks: tuple[Check, ...]
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether everything was compared and nothing is wrong."""
        return not self.wrong and not self.not_finite

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.is_wrong]

    @property
    def not_finite(self) -> list[Check]:
        """The checks that compared nothing, because both sides are NaN or infinite."""
        return [check for check in self.checks if check.verdict == NOT_FINITE]

    def check(self) -> "Verification":
        """Raises an `AssertionError` that says what `print` says, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))
        return self

    def to_dict(self) -> dict[str, object]:
        """Returns the same in plain Python types, as `json` takes them."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        table = _table.text_table(self._rows(), frozenset({2, 3, 4}))
        return "\n".join([*self._summary(), table, *self._left_out()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _table.html_table(self._summary(), self._rows(), below=self._left_out())

    def _summary(self) -> list[str]:
        unseen = sum(check.verdict == UNSEEN for check in self.checks)
        title = f"wrong: {len(self.wrong)} of {len(self.checks)} comparisons"
        if not self.wrong and self.not_finite:
            title = f"cannot tell: {len(self.not_finite)} of {len(self.checks)} are not finite"
        if self.ok:
            title = f"the step agrees with one device in {len(self.checks)} comparisons"
        title += f" ({unseen} too small to tell)" if unseen else ""
        lines = [f"{title}; tolerance {self.tolerance:.0e}"]
        width = max(map(len, self.losses))
        lines += [f"  {name.ljust(width)}  {value:.7g}" for name, value in self.losses.items()]
        return lines + [f"* {text}" for text in (*self.causes, *self.notes)]

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("leaf", "kind", "max difference", "scale", "tolerance", "verdict")
        rows = [
            (
                c.path,
                c.kind,
                f"{c.difference:.2e}",
                f"{c.scale:.2e}",
                f"{c.tolerance:.2e}",
                c.verdict + (", copies differ" if c.copies_differ else ""),
            )
            for c in self.checks[:ROWS_SHOWN]
        ]
        return [head, *rows]

    def _left_out(self) -> list[str]:
        left = len(self.checks) - ROWS_SHOWN
        return [f"and {left} more, none worse"] if left > 0 else []
