"""Which room may include what."""

import re

# Rooms that a room may include, itself apart. stubs stand in for files of the rooms they name.
ROOMS = {
    "base": set(),
    "kernel": {"base"},
    "schedule": set(),
    "memory": {"base"},
    "net": {"base", "schedule"},
    "group": {"base", "kernel", "memory", "net", "schedule"},
    "torch": {"base", "kernel", "memory", "net", "schedule", "group"},
    "stubs": {"base", "kernel", "memory", "net"},
}
# Single files that a room may include though their room is shut to it.
HATCHES = {"net": {"kernel/reduce/level.h"}}

# Headers of others: what they look like, and the files that may include them.
OUTSIDERS = (
    ("torch and Python", r"(ATen|c10|torch|pybind11|caffe2)/|Python\.h$", r"torch/"),
    ("UCX", r"(ucp|uct|ucs|ucm)/", r"net/(ucx\.cc|ucx_(library|worker)\.(cc|h))$"),
    ("NCCL", r"nccl\.h$", r"(?!)"),  # of no file: NCCL comes from Python
    (
        "CUDA",
        r"cuda(_\w+)?\.h$|cuda/|cooperative_groups|cub/|nvml\.h$|mma\.h$",
        r"kernel/(exec\.h|\w+\.cu)$",
    ),
)

SYSTEM = r"[a-z0-9_]+(\.h)?$|(sys|linux|netinet|arpa|net|asm)/[a-z0-9_]+\.h$"

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
CUDA_MACRO = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*__CUDA(?:CC|_ARCH)__", re.MULTILINE)


def breaches(path, text):
    """path: relative to csrc. One sentence for each include that the room's door does not lead to."""
    room = path.split("/")[0]
    if room not in ROOMS:
        return [f"csrc/{path}: {room} is not a room"]
    found = [verdict for mark, header in INCLUDE.findall(text) if (verdict := _judge(path, room, mark, header))]
    if CUDA_MACRO.search(text) and path != "kernel/exec.h":
        found.append("asks for __CUDACC__, which only kernel/exec.h may")
    return [f"csrc/{path}: {verdict}" for verdict in found]


def _judge(path, room, mark, header):
    for whose, pattern, where in OUTSIDERS:
        if re.match(pattern, header):
            return None if re.match(where, path) else f"includes {header}: headers of {whose} may not come here"
    target = header.split("/")[0]
    if mark == '"':
        if target not in ROOMS or ".." in header:
            return f'includes "{header}": includes are written from csrc'
        if target == room or target in ROOMS[room] or header in HATCHES.get(room, ()):
            return None
        return f"includes {header}: {room} may not see {target}"
    return None if re.match(SYSTEM, header) else f"includes <{header}>: not a header of the system"


# (path, text, whether it is a breach)
EXAMPLES = (
    ("kernel/cpu/direct.h", '#include "kernel/exec.h"\n#include <span>\n', False),
    ("kernel/cpu/direct.h", '#include "group/group.h"', True),
    ("kernel/cpu/direct.h", '  #  include "torch/work.h"', True),
    ("base/error.cc", '#include "kernel/cpu/pad.h"', True),
    ("base/error.cc", "#include <sys/socket.h>\n#include <linux/futex.h>", False),
    ("schedule/ring.h", '#include "base/error.h"', True),
    ("schedule/ring.h", '#include "schedule/step.h"\n#include <cstdint>', False),
    ("net/executor.cc", '#include "kernel/reduce/level.h"', False),
    ("net/executor.cc", '#include "kernel/cpu/launch.h"', True),
    ("net/executor.cc", '#include "kernel/exec.h"', True),
    ("net/executor.cc", "#include <ucp/api/ucp.h>", True),
    ("net/ucx/ucx.cc", "#include <ucp/api/ucp.h>", False),
    ("net/ucx/ucx_worker.h", "#include <ucp/api/ucp.h>", False),
    ("net/ucx/ucx.h", "#include <ucp/api/ucp.h>", True),
    ("memory/shm.cc", "#include <cuda_runtime.h>", True),
    ("memory/copy_cuda.cc", "#include <cuda_runtime.h>", True),
    ("torch/device/delegate.cc", "#include <nccl.h>", True),
    ("group/group.h", "#include <torch/csrc/distributed/c10d/Backend.hpp>", True),
    ("torch/work.h", "#include <torch/csrc/distributed/c10d/Work.hpp>", False),
    ("torch/work.h", '#include "group/group.h"', False),
    ("memory/shm.cc", '#include "../base/error.h"', True),
    ("memory/shm.cc", '#include "error.h"', True),
    ("attic/x.cc", "", True),
    ("kernel/cpu/direct.h", "#if defined(__CUDACC__)", True),
    ("kernel/exec.h", "#if defined(__CUDACC__)", False),
    ("kernel/exec.h", "#include <cuda/atomic>", False),
    ("kernel/gpu/device_collectives.h", "#include <cuda/atomic>", True),
    ("kernel/gpu/launch_cuda.cu", "#include <cuda_runtime_api.h>", False),
    ("kernel/gpu/launch_cuda.cu", "#include <ATen/ATen.h>", True),
)
