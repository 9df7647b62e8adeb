"""`python -m nvx.bench`: the same as `nvx bench`."""

import sys

from . import main

sys.exit(main())
