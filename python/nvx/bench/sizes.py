"""Message sizes in nccl-tests' form: "8", "64K", "1M", "2G" (powers of 1024), scanned by factor or by step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """The bytes that `text` names; raises ValueError with the accepted form."""
    body = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = body[-1:] if body[-1:] in ("k", "m", "g") else ""
    try:
        number = body.removesuffix(unit)
        size = (int if number.isdecimal() else float)(number) * _UNITS[unit]
    except ValueError:
        raise ValueError(f"'{text}' is not a size: write 8, 64K, 1M or 2G") from None
    if not 0 <= size < 1 << 62 or size != int(size):
        raise ValueError(f"'{text}' is not a whole number of bytes")
    return int(size)


def argument(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for argparse, which shows the text of its ValueError to the user."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def above(least: float, kind: type = int, most: float = (1 << 62) - 1) -> Callable[[str], Any]:
    """A converter for argparse of numbers from `least` to `most`."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:  # nan fails both
            raise ValueError(f"{text} is below {least}" if value < least else f"{text} is not at most {most}")
        return value

    return argument(convert)


size_argument = argument(parse_size)
sizes_argument = argument(lambda text: [parse_size(one) for one in text.split(",")])


def scan(smallest: int, largest: int, factor: float = 0, step: int = 0) -> list[int]:
    """Every size from `smallest` to `largest`, multiplied by `factor` or, if that is 0, increased by `step`."""
    if smallest > largest:
        raise ValueError(f"the smallest size ({smallest}) is above the largest ({largest})")
    if factor and (factor <= 1 or smallest < 1):
        raise ValueError("a factor must be above 1 and start from at least 1 byte")
    if not factor and step < 1:
        raise ValueError("a step must be at least 1 byte")
    sizes = [smallest]
    while True:
        after = int(sizes[-1] * factor) if factor else sizes[-1] + step
        after = max(after, sizes[-1] + 1)
        if after > largest:
            return sizes
        sizes.append(after)


def missed_end(scanned: list[int], largest: int) -> str:
    """A note that the steps do not end on the largest size requested; empty if they do."""
    if scanned[-1] == largest:
        return ""
    return f"{exact(largest)} is no step of this scan: the largest size is {exact(scanned[-1])}"


def exact(size: int) -> str:
    """The exact size, in the largest unit that can express it; "any" for a limit without bound."""
    if size == 1 << 40:
        return "any"
    unit = next((name for name in "gmk" if size and size % _UNITS[name] == 0), "")
    return f"{size // _UNITS[unit]}{unit.upper()}"


def show_size(size: int) -> str:
    """The short name of a size, for tables, plots and verdicts: 8 B, 64 KiB, 1.5 MiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def short_size(size: int) -> str:
    """The form that `parse_size` accepts, for narrow places: 8, 64K, 16M."""
    return show_size(size).replace("iB", "").replace(" B", "").replace(" ", "")
