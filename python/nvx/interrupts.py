"""Turns SIGTERM and SIGHUP into the exception that Ctrl-C raises, so that child processes are ended in order."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHUTDOWN_S = 30.0  # that an orderly shutdown may take


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises a KeyboardInterrupt that carries the signal's name.

    Later signals are ignored for SHUTDOWN_S seconds, for an orderly shutdown; after that they raise again, in case
    the first exception was dropped. A signal that is ignored stays ignored: shells start background jobs without
    SIGINT, and nohup without SIGHUP. Main thread only.
    """
    received: list[float] = []

    def receive(number: int, frame: object) -> None:
        now = time.monotonic()
        if not received or now - received[-1] > SHUTDOWN_S:
            received.append(now)
            raise KeyboardInterrupt("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in HANDLED}
    changed = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in changed:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Signals take effect at the end of the block: between the start of a child and its entry in a list, an exception
    would leave the child behind. Main thread only."""
    received: list[int] = []
    handled = [number for number in HANDLED if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)
