"""Which GPUs there are, asked of the driver in a process of its own: one that hangs or dies takes only that along."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from . import run

SECONDS = 30.0  # for an answer, at most

_ASK = """
import ctypes, json
found = {"gpus": [], "kind": "no GPU", "why": "", "code": 0}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    count = ctypes.c_int()
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    if code != 0:
        found["kind"], found["code"] = "driver refused", code
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


@dataclasses.dataclass
class Answer:
    """gpus: name and compute capability of each; without any, the kind of reason, the driver's code, and why."""

    gpus: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kind: str = ""  # no GPU, driver refused, driver hung, driver died
    why: str = ""
    code: int = 0

    def in_short(self) -> str:
        return self.kind + (f" (code {self.code})" if self.code else "")

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "code": self.code, "why": self.why}


def ask(seconds: float = SECONDS) -> Answer:
    """Raises KeyboardInterrupt as `run` was told of it."""
    asked = run.run([sys.executable, "-c", _ASK], seconds, dict(os.environ))
    if asked.state == "interrupted":
        raise KeyboardInterrupt(asked.why)
    if asked.state == "timed out":
        return Answer(kind="driver hung", why=f"the driver did not answer within {seconds:.0f} s")
    for line in asked.lines:
        if "gpus" in line:
            return Answer(**line) if not line["gpus"] else Answer(line["gpus"])
    return Answer(kind="driver died", why=f"asking the driver went wrong: {asked.why}")


def driver_version() -> str:
    """Of the kernel's module."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return ""
