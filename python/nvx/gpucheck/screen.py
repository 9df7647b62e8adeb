"""What the one who called reads. Where nobody does any more, as behind `| head`, the run goes on to its file."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


def _print(stream: Any, text: str, end: str) -> None:
    try:
        print(text, end=end, file=stream, flush=True)
    except (OSError, ValueError):  # nobody reads, the terminal is gone, or it was closed
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # what is left in its buffer goes there too
            os.close(nowhere)


def say(text: str = "", end: str = "\n") -> None:
    _print(sys.stdout, text, end)


def warn(text: str) -> None:
    _print(sys.stderr, f"nvx gpucheck: {text}", "\n")
