"""What the figures of a run stand on: which nvx, and which tools and libraries made it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

from ..bench import machine
from . import build, by_hand, processes
from .steps import BuildError

SOON = 10.0  # seconds for a tool to say its version
OF_SOURCES = ("csrc", "cmake", "python", "tests", "CMakeLists.txt")  # not the results that a run leaves there


def found(source: Path | None) -> dict[str, Any]:
    """What is absent is left out, torch with the reason."""
    try:
        known = machine.versions() | of_torch()
    except Exception as error:  # a torch that is broken raises what it likes
        known = {"python": platform.python_version(), "nvx": machine.NVX, "torch": f"none ({error})"}
    tools = {"nvcc": of_nvcc(), "compiler": of_compiler()}
    known |= {name: version for name, version in tools.items() if version}
    return known | of_checkout(source) if source else known


def of_torch() -> dict[str, str]:
    """The libraries that it was built with."""
    import torch

    libraries = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    with contextlib.suppress(Exception):  # a torch without NCCL does not even say so
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return libraries


def of_nvcc() -> str:
    try:
        said = processes.answer([str(build.find_nvcc()), "--version"], SOON)
    except BuildError:
        return ""
    version = re.search(r"\bV(\d[\d.]*)", said)
    return version.group(1) if version else ""


def of_compiler() -> str:
    try:
        said = processes.answer([by_hand.find_compiler(), "--version"], SOON)
    except BuildError:
        return ""
    return said.partition("\n")[0]


def of_checkout(source: Path) -> dict[str, Any]:
    """The commit, and whether what is built differs from it; nothing where the sources are no checkout of git's."""

    def ask(*words: str) -> str:
        surroundings = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        return processes.answer(["git", "-C", str(source), *words], SOON, env=surroundings)

    top, _, commit = ask("rev-parse", "--show-toplevel", "HEAD").partition("\n")
    if not commit or Path(top).resolve() != source.resolve():
        return {}
    return {"commit": commit, "dirty": bool(ask("status", "--porcelain", "--", *OF_SOURCES))}
