"""What torch's test utilities take from the package expecttest, for machines that do not have it.

They derive every test case from its `TestCase` and read its `ACCEPT`. This one compares texts as the package does; what
it leaves out is rewriting a test's source with the text that was found, which nobody asks for here.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable
from typing import Any

NAME = "expecttest"
ACCEPT = False
CPP_STACK = "\nException raised from"  # torch's errors go on with it, and it differs from machine to machine


class TestCase(unittest.TestCase):
    longMessage = True

    def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
        self.assertMultiLineEqual(expect, actual.rpartition(CPP_STACK)[0] or actual)

    def assertExpectedRaisesInline(
        self, kind: type[BaseException], call: Callable[..., Any], expect: str, *args: Any, **kwargs: Any
    ) -> None:
        with self.assertRaises(kind) as caught:
            call(*args, **kwargs)
        self.assertExpectedInline(str(caught.exception), expect)


def stand_in() -> None:
    """Answers to the package's name where it is missing. Before torch's test utilities are imported, in every process
    that imports them."""
    if importlib.util.find_spec(NAME) is None:
        sys.modules[NAME] = sys.modules[__name__]
