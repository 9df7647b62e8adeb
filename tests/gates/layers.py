"""The includes that are allowed between components, and between folders of a component."""

import re

# Components that a component may include beside itself. `stubs` replace files of the components that they name.
COMPONENTS = {
    "base": set(),
    "kernel": {"base"},
    "schedule": set(),
    "memory": {"base"},
    "net": {"base", "schedule"},
    "group": {"base", "kernel", "memory", "net", "schedule"},
    "torch": {"base", "kernel", "memory", "net", "schedule", "group"},
    "stubs": {"base", "kernel", "memory", "net"},
}
# Folders of its own component that a folder may include beside itself. The table has no cycle.
FOLDERS = {
    "base": set(),
    "schedule": set(),
    "stubs": set(),
    "kernel/reduce": set(),
    "kernel/reduce/levels": {"kernel/reduce"},
    "kernel": {"kernel/reduce"},
    "kernel/cpu": {"kernel", "kernel/reduce"},
    "kernel/gpu": {"kernel", "kernel/reduce", "kernel/cpu"},
    "memory/shm": set(),
    "memory/driver": set(),
    "memory/gpu": {"memory/shm", "memory/driver"},
    "net": set(),
    "net/tcp": {"net"},
    "net/ucx": {"net"},
    "group/plan": set(),
    "group/setup": {"group/plan"},
    "group/core": {"group/plan", "group/setup"},
    "group/device": {"group/plan", "group/setup", "group/core"},
    "group/hierarchy": {"group/plan", "group/setup", "group/core", "group/device"},
    "group/p2p": {"group/plan", "group/setup", "group/core"},
    "group": {"group/plan", "group/setup", "group/core", "group/device", "group/hierarchy", "group/p2p"},
    "torch/core": set(),
    "torch/streams": {"torch/core"},
    "torch/call": {"torch/core", "torch/streams"},
    "torch/device": {"torch/core", "torch/streams", "torch/call"},
    "torch/arguments": {"torch/core", "torch/streams", "torch/call", "torch/device"},
    "torch": {"torch/core", "torch/streams", "torch/call", "torch/device", "torch/arguments"},
    "torch/reconfigure": {"torch", "torch/core", "torch/call"},
    "torch/symmetric": {"torch", "torch/core", "torch/streams", "torch/call", "torch/device"},
    "torch/python": {"torch", "torch/core", "torch/streams", "torch/device", "torch/reconfigure", "torch/symmetric"},
}
# Single files that a folder may include although neither their folder nor their component is allowed: the loops of
# `level.h`, the factories of the links, the layouts that the verbs of a tile write to, the names of the collectives.
EXCEPTIONS = {
    "schedule": {"base/collective.h"},
    "net": {"kernel/reduce/level.h", "net/tcp/tcp.h", "net/ucx/ucx.h"},
    "kernel": {"kernel/gpu/device_pad.h"},
}
# The number of units (a stem: .h, .cc and .cu together) that a folder may hold.
MOST_UNITS = 20

# Headers of other projects: their pattern, and the files that may include them.
EXTERNAL = (
    ("torch and Python", r"(ATen|c10|torch|pybind11|caffe2)/|Python\.h$", r"torch/"),
    ("UCX", r"(ucp|uct|ucs|ucm)/", r"net/ucx/(?!ucx\.h$)"),
    ("NVTX", r"nvtx3/", r"torch/core/tool_range\.cc$"),
    ("NCCL", r"nccl\.h$", r"(?!)"),  # no file may: NCCL is used from Python
    (
        "CUDA",
        r"cuda(_\w+)?\.h$|cuda/|cooperative_groups|cub/|nvml\.h$|mma\.h$",
        r"kernel/(exec\.h|gpu/\w+\.cu)$",
    ),
)

SYSTEM = r"[a-z0-9_]+(\.h)?$|(sys|linux|netinet|arpa|net|asm)/[a-z0-9_]+\.h$"

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
CUDA_MACRO = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*__CUDA(?:CC|_ARCH)__", re.MULTILINE)


def breaches(path, text):
    """`path` is relative to csrc. One sentence for each include that the tables do not allow."""
    component, folder = path.split("/")[0], path.rpartition("/")[0]
    if component not in COMPONENTS:
        return [f"csrc/{path}: {component} is not a component"]
    if folder not in FOLDERS:
        return [f"csrc/{path}: {folder} is not a folder of {component}"]
    found = [verdict for mark, header in INCLUDE.findall(text) if (verdict := _judge(path, mark, header))]
    if CUDA_MACRO.search(text) and path != "kernel/exec.h":
        found.append("reads __CUDACC__, which only kernel/exec.h may")
    return [f"csrc/{path}: {verdict}" for verdict in found]


def _judge(path, mark, header):
    component, folder = path.split("/")[0], path.rpartition("/")[0]
    target, inside = header.split("/")[0], header.rpartition("/")[0]
    for whose, pattern, where in EXTERNAL:
        if re.match(pattern, header) and not (mark == '"' and target in COMPONENTS):
            return None if re.match(where, path) else f"includes {header}: headers of {whose} may not come here"
    if mark == "<":
        return None if re.match(SYSTEM, header) else f"includes <{header}>: not a header of the system"
    if target not in COMPONENTS or ".." in header:
        return f'includes "{header}": includes are written from csrc'
    if header in EXCEPTIONS.get(folder, ()):
        return None
    if target != component:
        return None if target in COMPONENTS[component] else f"includes {header}: {component} may not see {target}"
    if inside == folder or inside in FOLDERS[folder]:
        return None
    return f"includes {header}: {folder} may not see {inside}"


def circles(folders):
    """Pairs of folders that may include each other, directly or through others."""
    reach = {folder: set(seen) for folder, seen in folders.items()}
    for _ in folders:
        reach = {folder: seen.union(*(reach[s] for s in seen)) for folder, seen in reach.items()}
    return [f"{a} and {b} may include each other" for a in folders for b in reach[a] if a < b and a in reach[b]]


def crowded(paths):
    """`paths` are relative to csrc."""
    units = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        units.setdefault(folder, set()).add(name.split(".")[0])
    return [f"csrc/{f} holds {len(u)} units (at most {MOST_UNITS})" for f, u in units.items() if len(u) > MOST_UNITS]


# (path, text, whether it is a breach)
EXAMPLES = (
    ("kernel/cpu/host_collectives.h", '#include "kernel/exec.h"\n#include <span>\n', False),
    ("kernel/cpu/host_collectives.h", '#include "group/group.h"', True),
    ("kernel/cpu/host_collectives.h", '  #  include "torch/work.h"', True),
    ("kernel/reduce/level.h", '#include "kernel/cpu/pad.h"', True),
    ("kernel/exec.h", '#include "kernel/gpu/device_pad.h"', False),
    ("kernel/exec.h", '#include "kernel/gpu/packs.h"', True),
    ("base/error.cc", '#include "kernel/cpu/pad.h"', True),
    ("base/error.cc", "#include <sys/socket.h>\n#include <linux/futex.h>", False),
    ("schedule/ring.h", '#include "base/error.h"', True),
    ("schedule/ring.h", '#include "schedule/step.h"\n#include <cstdint>', False),
    ("schedule/catalog.h", '#include "base/collective.h"', False),
    ("net/executor.cc", '#include "kernel/reduce/level.h"', False),
    ("net/executor.cc", '#include "kernel/reduce/dtype.h"', True),
    ("net/executor.cc", '#include "kernel/cpu/run_on_cpu.h"', True),
    ("net/executor.cc", '#include "kernel/exec.h"', True),
    ("net/executor.cc", "#include <ucp/api/ucp.h>", True),
    ("net/messenger.cc", '#include "net/ucx/ucx.h"', False),
    ("net/messenger.cc", '#include "net/ucx/ucx_worker.h"', True),
    ("net/ucx/ucx.cc", '#include "net/link.h"\n#include <ucp/api/ucp.h>', False),
    ("net/ucx/ucx_worker.h", "#include <ucp/api/ucp.h>", False),
    ("net/ucx/ucx.h", "#include <ucp/api/ucp.h>", True),
    ("memory/shm/arena.cc", '#include "memory/gpu/device_pool.h"', True),
    ("memory/gpu/device_arena.cc", '#include "memory/driver/apart.h"\n#include "memory/shm/spans.h"', False),
    ("memory/shm/arena.cc", "#include <cuda_runtime.h>", True),
    ("memory/gpu/copy_cuda.cc", "#include <cuda_runtime.h>", True),
    ("memory/shm/arena.cc", '#include "../base/error.h"', True),
    ("memory/shm/arena.cc", '#include "error.h"', True),
    ("group/p2p/mailbox.cc", '#include "group/core/core.h"', False),
    ("group/p2p/mailbox.cc", '#include "group/group.h"', True),
    ("group/device/kernel_executor.cc", '#include "group/hierarchy/host_proxy.h"', True),
    ("group/setup/setup.cc", '#include "group/core/core.h"', True),
    ("group/plan/plan.cc", '#include "group/setup/members.h"', True),
    ("group/core/core.h", '#include "group/p2p/mailbox.h"', True),
    ("group/group.cc", '#include "group/hierarchy/hierarchical.h"', False),
    ("group/attic/x.cc", "", True),
    ("group/group.h", "#include <torch/csrc/distributed/c10d/Backend.hpp>", True),
    ("group/group.h", "#include <ATen/ATen.h>", True),
    ("torch/work.h", "#include <torch/csrc/distributed/c10d/Work.hpp>", False),
    ("torch/work.h", '#include "group/group.h"', False),
    ("torch/device/delegate.cc", "#include <nccl.h>", True),
    ("torch/reconfigure/x.cc", '#include "torch/device/pool.h"', True),
    ("attic/x.cc", "", True),
    ("kernel/cpu/host_collectives.h", "#if defined(__CUDACC__)", True),
    ("kernel/exec.h", "#if defined(__CUDACC__)", False),
    ("kernel/exec.h", "#include <cuda/atomic>", False),
    ("kernel/gpu/device_collectives.h", "#include <cuda/atomic>", True),
    ("kernel/gpu/launch_cuda.cu", "#include <cuda_runtime_api.h>", False),
    ("kernel/gpu/launch_cuda.cu", "#include <ATen/ATen.h>", True),
)
# (table of folders, whether it is a breach)
CIRCLE_EXAMPLES = (
    ({"a": {"a/b"}, "a/b": set()}, False),
    ({"a": {"a/b"}, "a/b": {"a"}}, True),
    ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, True),
)
# (paths, whether it is a breach)
UNIT_EXAMPLES = (
    ([f"net/x{i}.{ext}" for i in range(MOST_UNITS) for ext in ("h", "cc")], False),
    ([f"net/x{i}.h" for i in range(MOST_UNITS + 1)], True),
)
