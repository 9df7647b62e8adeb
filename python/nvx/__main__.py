"""`python -m nvx`: the `nvx` command."""

import sys

from .cli import main

sys.exit(main())
