"""When a part has to end: one moment for all of its processes, by a clock that they share. Each would else begin to
count when it has imported torch, and end after the one that waits for it."""

from __future__ import annotations

import argparse
import time

NO_TIME = "there was no time for it"
LEAST = 5.0  # seconds: with less left, ranks are not begun


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="until the end, from now")
    parser.add_argument("--until", type=float, help="the end, by time.monotonic(); comes before --seconds")


def end_of(arguments: argparse.Namespace) -> float:
    """The same however often it is asked."""
    if arguments.until is None:
        arguments.until = time.monotonic() + arguments.seconds
    return arguments.until


def left(end: float) -> float:
    return end - time.monotonic()
