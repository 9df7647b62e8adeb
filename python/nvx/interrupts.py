"""Signals that ask a process to end, as the exception that Ctrl-C raises: what it has started then ends with it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS = 30.0  # seconds, in which an orderly end is over


class Heard:
    """What has come by now. status: what a process ends with that one of them ended."""

    number: int = 0
    at: float = 0.0

    @property
    def status(self) -> int:
        return 128 + (self.number or signal.SIGINT)

    def look(self) -> None:
        """Raises what came where nobody could raise: in code that Python calls and whose exceptions it drops."""
        if self.number:
            raise KeyboardInterrupt(_name(self.number))


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextlib.contextmanager
def heeded() -> Iterator[Heard]:
    """The first of the signals raises a KeyboardInterrupt that says its name. Later ones do nothing for a while, so
    that the end which it begins is an orderly one; after that they raise it again, should it have been dropped. What
    is ignored remains so: a shell's background jobs begin without Ctrl-C, and nohup's without SIGHUP. In the main
    thread."""
    heard = Heard()

    def hear(number: int, frame: object) -> None:
        now = time.monotonic()
        if not heard.number or now - heard.at > ENDS:
            heard.number, heard.at = number, now
            heard.look()

    before = {number: signal.getsignal(number) for number in HEEDED}
    changed = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in changed:
        signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number in changed:
            signal.signal(number, before[number])


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """For a moment in which nothing is started: they come when it is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
