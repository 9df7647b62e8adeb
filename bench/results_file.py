"""Reading of the files that `nvx bench -J` and the programs of this folder write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvx.bench.machine import SCHEMA


def read(path: str) -> dict[str, Any]:
    """Reads a results file; ValueError gives the fault of any other file."""
    try:
        contents = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(contents, dict) or contents.get("schema") != SCHEMA:
        raise ValueError(f"{path} was not written by this nvx (schema {SCHEMA})")
    return contents
