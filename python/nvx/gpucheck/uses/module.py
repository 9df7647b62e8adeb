"""nvx's torch module from where it was built."""

from __future__ import annotations

import importlib.util
import sys


def load_module(file: str) -> None:
    """In the place of nvx's own, for the life of the process. Before the first group is made."""
    spec = importlib.util.spec_from_file_location("nvx._C", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module")
    sys.modules["nvx._C"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
