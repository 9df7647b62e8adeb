"""Contenders by name: the ones that take part, and the reasons why others cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from .peers import NULL, Contender, TorchContender, Unsupported, torch_backend
from .sockets import SocketContender
from .symmetric import SymmetricContender
from .world import World

# Contenders beside torch's backends, each made of its name and the world. bench/run.py has more.
OTHERS: dict[str, Callable[[str, World], Contender]] = {"socket": SocketContender, "symm_mem": SymmetricContender}


def known() -> list[str]:
    """Every name that could take part, whether or not this machine has it."""
    torchs = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return list(dict.fromkeys(["nvx", NULL, *OTHERS, *torchs]))


def _is_here(name: str) -> bool:
    """Whether this torch has the backend. Third-party backends and contenders of the bench have no such function."""
    of_torch = getattr(dist, f"is_{name}_available", None)
    return name in OTHERS or of_torch is None or of_torch()


def peers_of(backend: str) -> str:
    """The names of contenders to measure beside `backend`, as text: those that are here and those that are not."""
    serving_cpu = dist.Backend.backend_capability
    own = ("nvx", NULL, *OTHERS)
    names = [name for name in known() if name in own or ("cpu" in serving_cpu.get(name, ()) and name != "fake")]
    here = [name for name in names if name != backend and _is_here(name)]
    missing = [name for name in names if name != backend and name not in here]
    return ", ".join(here) + (f"; not in this torch: {', '.join(missing)}" if missing else "")


def enlist(names: list[str], world: World, timeout: float) -> tuple[list[Contender], dict[str, str]]:
    """The contenders by name, and the reason for each that cannot take part. The same on every rank."""
    able: list[Contender] = []
    refused: dict[str, str] = {}
    for position, base in enumerate(names):
        again = names[:position].count(base)
        name = f"{base}#{again + 1}" if again else base
        contender, reason = None, ""
        try:
            contender = _make(base, name, world, timeout)
        except (Unsupported, ImportError, RuntimeError, ValueError, OSError) as error:
            lines = str(error).removeprefix("nvx: ").strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
        reason = world.agreed(reason)
        if reason or contender is None:
            refused[name] = reason
            if position:  # without the backend under test, nothing is measured
                world.log(f"# left out: {name} ({reason})")
        else:
            able.append(contender)
    return able, refused


def _make(base: str, name: str, world: World, timeout: float) -> Contender:
    if base in OTHERS:
        return OTHERS[base](name, world)
    return TorchContender(name, torch_backend(base), world, timeout)
