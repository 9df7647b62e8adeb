"""Contenders by name: the ones that take part, and the reasons why others cannot."""

from __future__ import annotations

import importlib.util

import torch.distributed as dist

from .peers import NULL, Contender, TorchContender, Unsupported, torch_backend
from .world import World

OWN = ("nvx", NULL, "deepspeed", "mpi", "socket", "symm_mem")  # contenders of this package, which torch may not know


def known() -> list[str]:
    """Every name that could take part, whether or not this machine has it."""
    torchs = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return list(dict.fromkeys([*OWN, *torchs]))


def _is_here(name: str) -> bool:
    """Whether the contender is installed, without starting it."""
    package = {"deepspeed": "deepspeed", "mpi": "mpi4py"}.get(name)
    if package:
        return importlib.util.find_spec(package) is not None
    of_torch = getattr(dist, f"is_{name}_available", None)  # third-party backends have no such function
    return of_torch is None or of_torch()


def peers_of(backend: str) -> str:
    """The names of contenders to measure beside `backend`, as text: those installed here and those that are not."""
    serving_cpu = dist.Backend.backend_capability
    names = [name for name in known() if name in OWN or ("cpu" in serving_cpu.get(name, ()) and name != "fake")]
    here = [name for name in names if name != backend and _is_here(name)]
    missing = [name for name in names if name != backend and name not in here]
    return ", ".join(here) + (f"; not installed: {', '.join(missing)}" if missing else "")


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
        else:
            able.append(contender)
    return able, refused


def _make(base: str, name: str, world: World, timeout: float) -> Contender:
    """Each contender is imported when it is used, because some need packages that are not installed."""
    if base == "symm_mem":
        from .symmetric import SymmetricContender

        return SymmetricContender(name, world)
    if base in ("socket", "deepspeed", "mpi") and world.device.type != "cpu":
        raise Unsupported(f"{base} takes tensors of the CPU")
    if base == "socket":
        from .sockets import SocketContender

        return SocketContender(name, world)
    if base == "deepspeed":
        from .direct import DeepSpeedContender

        return DeepSpeedContender(name, world)
    if base == "mpi":
        from .direct import MpiContender

        return MpiContender(name, world)
    return TorchContender(name, torch_backend(base), world, timeout)
