"""What parts wrote, a JSON object a line, and whether it can be made sense of: nothing relies on what a program prints,
which may go wrong in any way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Kind = Callable[[Any], bool]
DEEPEST = 20  # objects and lists within each other, in a line


def number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def figure(value: Any) -> bool:
    """What has been measured."""
    return number(value) and value > 0


def count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def text(value: Any) -> bool:
    return isinstance(value, str)


def table(value: Any) -> bool:
    return isinstance(value, dict)


def row(value: Any) -> bool:
    return isinstance(value, list)


def lines_of(document: dict[str, Any], part: str, **kinds: Kind) -> list[dict[str, Any]]:
    """The lines of a part in which each of these is of its kind. Another one counts as not measured."""
    found = document["parts"].get(part, {}).get("lines", [])
    return [line for line in found if all(name in line and kind(line[name]) for name, kind in kinds.items())]


def is_deep(value: Any, deepest: int = DEEPEST) -> bool:
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return deepest == 0 or any(is_deep(one, deepest - 1) for one in within)


def read(line: str) -> dict[str, Any] | None:
    """None: no JSON object, or one so deep that it could not be written again."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_deep(found) else None
