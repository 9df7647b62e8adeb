"""Signals that ask a process to end, as the exception that Ctrl-C raises: what it has started then ends with it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS = 30.0  # seconds, in which an orderly end is over


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """The first of the signals raises a KeyboardInterrupt that says its name. Later ones do nothing for a while, so
    that the end which it begins is an orderly one; after that they raise it again, should it have been dropped. What
    is ignored remains so: a shell's background jobs begin without Ctrl-C, and nohup's without SIGHUP. In the main
    thread."""
    heard: list[float] = []

    def hear(number: int, frame: object) -> None:
        now = time.monotonic()
        if not heard or now - heard[-1] > ENDS:
            heard.append(now)
            raise KeyboardInterrupt("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in HEEDED}
    changed = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in changed:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
