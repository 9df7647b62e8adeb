"""What the figures of a run stand on: which nvx, of which tools and libraries."""

from __future__ import annotations

import platform
from typing import Any

from ..bench import machine


def found() -> dict[str, Any]:
    """Of the head of a results file, what has to be imported to be known; without torch's where there is none."""
    try:
        return {"versions": machine.versions()}
    except Exception as error:  # one that is broken raises what it likes
        return {"versions": {"python": platform.python_version(), "torch": f"none ({error})"}}
