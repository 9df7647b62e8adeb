"""The file of a run: kept whole after every part, and where it can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..bench import machine
from . import screen


def places(wanted: Path) -> list[Path]:
    """Where it is wanted, and where else it may be: a checkout may be read-only."""
    elsewhere = [Path.cwd() / wanted.name]
    try:
        elsewhere.append(Path(tempfile.gettempdir()) / wanted.name)
    except OSError:
        pass
    return list(dict.fromkeys([wanted.absolute(), *elsewhere]))


class File:
    """path: where the last that could be written is; None: nowhere."""

    def __init__(self, wanted: Path) -> None:
        self.wanted = wanted
        self.places = places(wanted)
        self.path: Path | None = None
        self.why = ""  # it is not whole

    def write(self, document: dict[str, Any]) -> None:
        """No error ends the run: it is told, and the next part writes anew."""
        refused = []
        for place in self.places:
            try:
                machine.write(str(place), document)
            except OSError as error:
                refused.append(f"{place} ({error.strerror or error})")
                continue
            if refused:
                screen.warn(f"{', '.join(refused)} cannot be written: the results go to {place}")
                self.places = self.places[self.places.index(place) :]
            self.path, self.why = place, ""
            return
        why = f"the results cannot be written: {', '.join(refused)}"
        if why != self.why:
            screen.warn(f"{why}. The run goes on; make room there, or name another file with -J")
        self.why = why

    def told(self) -> str:
        """Where it is, in a line."""
        if not self.why:
            return f"written: {self.path}"
        return f"not written: {self.why}" + (f"; {self.path} has what was found before" if self.path else "")
