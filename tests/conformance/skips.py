"""Tests that are not run, each with its reason. Only tests of gloo itself may stand here.

A name alone stands for all passes, `pass:name` for one.
"""

from __future__ import annotations

SKIPS: dict[str, str] = {}

# Tests that need a process nobody has used: what they look at, torch sets once a process.
NEEDS_NEW_RANKS: dict[str, str] = {}


def reason(pass_name: str, test: str, backend: str) -> str | None:
    if backend == "gloo":
        return None
    return SKIPS.get(test) or SKIPS.get(f"{pass_name}:{test}")
