"""`python -m tests.conformance`: see `cli.py`, or `--help`."""

import sys

from tests.conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
