"""`python -m nvx.bench`: the same as `nvx bench`."""

import sys

from nvx.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
