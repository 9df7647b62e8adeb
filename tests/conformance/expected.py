"""Replaces the package expecttest, which torch's test utilities import, on machines without it.

The utilities derive every test case from its `TestCase` and read its `ACCEPT`. This module compares texts as the
package does. It does not rewrite a test's source with the actual text, because no test here needs that."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable
from typing import Any

NAME = "expecttest"
ACCEPT = False
CPP_STACK = "\nException raised from"  # the trailer of torch's errors, which differs between machines


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
    """Registers a module under the package's name if the package is missing. Call it before the import of torch's
    test utilities, in every process that imports them."""
    if importlib.util.find_spec(NAME) is None:
        sys.modules[NAME] = sys.modules[__name__]
