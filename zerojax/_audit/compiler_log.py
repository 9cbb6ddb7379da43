"""What the compiler says on standard error while it works; JAX passes none of it on."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_START = re.compile(r"^(?=[IWEF]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log)", re.MULTILINE)
# Information, and what XLA logs of its own work: `audit` and `forecast` say what came of it.
_HARMLESS = re.compile(
    r"I\d{4} |.* I .*\.cc|WARNING: All log messages before absl::InitializeLog"
    r"|.*(slow_operation_alarm|hlo_rematerialization)\.cc|.*Registers are spilled"
)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Fills a list with the lines that native code wrote, and passes them on when done: all of
    them where it fails, else less what is harmless."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        wanted = lambda said: said  # noqa: E731
        try:
            yield lines
            wanted = _serious
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said = file.read().decode(errors="replace")
            lines += said.splitlines()
            if passed_on := wanted(said):
                os.write(2, passed_on.encode())


def _serious(said: str) -> str:
    """Less the messages, of several lines maybe, that are harmless."""
    return "".join(part for part in _START.split(said) if not _HARMLESS.match(part))
