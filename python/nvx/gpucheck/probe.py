"""Which GPUs there are, asked of the driver in a process of its own: one that hangs or dies takes only that along."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_ASK = """
import ctypes, json
found = {"gpus": [], "why": ""}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    count = ctypes.c_int()
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0:
        text = ctypes.c_char_p()
        told = cuda.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value
        found["why"] = f"the driver refuses with code {code}" + (f" ({text.value.decode()})" if told else "")
        if code == 802:
            found["why"] += ": where switches join the GPUs, nvidia-fabricmanager has to run"
    elif count.value == 0:
        found["why"] = "the driver counts none"
    for i in range(count.value):
        device, name, major, minor = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found["gpus"].append({"name": name.value.decode(), "compute": f"{major.value}.{minor.value}"})
except OSError as error:
    found["why"] = f"no driver ({error})"
print(json.dumps(found))
"""


def gpus() -> tuple[list[dict[str, Any]], str]:
    """Name and compute capability of each GPU; and where there is none, why."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
        found = json.loads(asked.stdout)
    except subprocess.TimeoutExpired:
        return [], "the driver did not answer within 30 s"
    except json.JSONDecodeError:
        return [], f"asking the driver ended with code {asked.returncode}"
    return found["gpus"], found["why"]


def driver_version() -> str:
    """Of the kernel's module."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return ""
