"""Turns SIGTERM and SIGHUP into the exception that Ctrl-C raises, so that child processes are ended in order."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHUTDOWN_S = 30.0  # that an orderly shutdown may take


@contextlib.contextmanager
def handled(receive: Callable[[int, object], None]) -> Iterator[None]:
    """The signals call `receive`. A signal that is ignored stays ignored: shells start background jobs without SIGINT,
    and nohup without SIGHUP. Main thread only."""
    changed = [number for number in HANDLED if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, receive) for number in changed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises a KeyboardInterrupt that carries the signal's name.

    Later signals are ignored for SHUTDOWN_S seconds, for an orderly shutdown; after that they raise again, in case
    the first exception was dropped.
    """
    received: list[float] = []

    def receive(number: int, frame: object) -> None:
        now = time.monotonic()
        if not received or now - received[-1] > SHUTDOWN_S:
            received.append(now)
            raise KeyboardInterrupt("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    with handled(receive):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Signals take effect at the end of the block: between the start of a child and its entry in a list, an exception
    would leave the child behind."""
    received: list[int] = []
    try:
        with handled(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)
