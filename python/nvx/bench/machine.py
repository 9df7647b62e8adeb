"""The context of a figure: the machine, the versions, and the present state of the cores."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .._version import __version__

SCHEMA = 1
NVX = __version__  # also in a checkout, which has no package metadata


def first_line(path: str) -> str:
    """The first line of a file; empty if there is none."""
    with contextlib.suppress(OSError), open(path) as file:
        return file.readline().strip()
    return ""


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def caches() -> list[dict[str, str]]:
    """The caches that CPU 0 has or shares: name, size, and the CPUs that share it."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*")):
        name = f"L{first_line(f'{index}/level')}"
        name += {"Data": "d", "Instruction": "i"}.get(first_line(f"{index}/type"), "")
        shared = first_line(f"{index}/shared_cpu_list")
        found.append({"name": name, "size": first_line(f"{index}/size"), "cpus": shared})
    return found


def cpu_model() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Describes the machine, without names or addresses."""
    flags, native = _field("/proc/cpuinfo", "flags").split(), sys.modules.get("nvx._C")
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": native.processor()["cores"] if native else len(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count(),
        "virtual": "hypervisor" in flags,
        "simd": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags],
        "caches": {one["name"]: f"{one['size']} shared by cpus {one['cpus']}" for one in caches()},
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "governor": first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def versions() -> dict[str, Any]:
    """Every version that affects a figure; missing packages are left out."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found["libc"] = " ".join(platform.libc_ver())
    found["nvx"] = NVX
    for package in ("deepspeed", "mpi4py", "numpy"):
        if (version := _version(package)) is not None:
            found[package] = version
    if "mpi4py.MPI" in sys.modules:
        found["mpi"] = sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0].strip(" ,\0")
    native = sys.modules.get("nvx._C")
    if native is not None and hasattr(native, "build_info"):
        found["nvx_build"] = {key: str(value) for key, value in native.build_info().items()}
    return found


def document(what: str, command: str, arguments: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """The head that every results file has, and the rest."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    head = {"schema": SCHEMA, "what": what, "command": command, "when": now.isoformat()}
    return head | {"machine": describe(), "versions": versions(), "arguments": arguments, **rest}


def as_text(value: Any, depth: int = 0) -> str:
    """JSON with one row of a table a line: a value without a list of objects stays on one line."""
    if not _holds_rows(value):
        return json.dumps(value)
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        return f"[{inner}" + f",{inner}".join(as_text(one, depth + 1) for one in value) + f"{outer}]"
    fields = (f"{json.dumps(str(name))}: {as_text(one, depth + 1)}" for name, one in value.items())
    return f"{{{inner}" + f",{inner}".join(fields) + f"{outer}}}"


def _holds_rows(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(one, dict) for one in value)
    return isinstance(value, dict) and any(_holds_rows(one) for one in value.values())


def check_writable(path: str) -> None:
    """Raises OSError if the file cannot be written, before what it is to hold takes minutes. Makes no file."""
    if Path(path).is_fifo():
        return  # its reader would see the end
    real = os.path.realpath(path)
    existed = os.path.exists(real)
    os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
    if not existed:
        os.remove(real)


def write(path: str, contents: dict[str, Any]) -> None:
    """Writes atomically: a reader never sees half a file. A pipe or a device such as /dev/stdout is written to
    directly, and a link stays a link to the written file."""
    target = Path(path)
    text = as_text(contents) + "\n"
    if target.exists() and not target.is_file():
        target.write_text(text)
        return
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(target)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EBUSY, errno.EROFS):  # a folder not ours, a file mounted alone
            raise
        target.write_text(text)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
