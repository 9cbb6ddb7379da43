"""What the compiler says on standard error while it works; JAX passes none of it on."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Fills a list with the lines that native code wrote, and passes them on when done."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said = file.read()
            lines += said.decode(errors="replace").splitlines()
            os.write(2, said) if said else None
