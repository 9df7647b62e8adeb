"""`nvx bench`: times collectives and training steps over nvx and over other backends, in the same processes."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (without `nvx bench` itself) and returns the exit status."""
    from .cli import main as run

    return run(arguments)
