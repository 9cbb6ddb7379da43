"""The command line: python -m zerojax."""

import sys

from zerojax.tools._cli import main

if __name__ == "__main__":
    sys.exit(main())
