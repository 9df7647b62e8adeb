"""Tests that do not run, each with its reason. Only tests of gloo itself are allowed here.

A plain name applies to all passes, `pass:name` to one."""

from __future__ import annotations

SKIPS: dict[str, str] = {"served:test_ddp_logging_data_cpu": "compares the thread count of gloo itself"}

# Tests that need a fresh process: torch sets the state that they check once a process.
NEEDS_NEW_RANKS: dict[str, str] = {}


def reason(pass_name: str, test: str, backend: str) -> str | None:
    if backend == "gloo":
        return None
    return SKIPS.get(test) or SKIPS.get(f"{pass_name}:{test}")
