"""`python -m nvx.bench`: the same as `nvx bench`."""

import sys

from .cli import main

sys.exit(main())
