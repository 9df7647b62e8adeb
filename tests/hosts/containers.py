"""Ranks of one machine in containers: python -m tests.hosts.containers CELLS (JSON), as root.

A cell is the boxes of its ranks; a box is a list of steps that enclose a rank: ["namespaces", "pid", "ipc"],
["forbid", "memfd_create"], ["limit", "NOFILE", 24]. The ranks are forked from this process, which has loaded nvx.
Prints a line of JSON for each cell: how each rank ended."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import tempfile
import time
from datetime import timedelta

import nvx._C  # noqa: F401
import torch
import torch.distributed as dist

TIMEOUT = 40.0
LIMIT = 60.0  # seconds after which a cell hangs
OTHER_USER = 4711
LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = dict(mount=0x20000, uts=0x4000000, ipc=0x8000000, user=0x10000000, pid=0x20000000, net=0x40000000)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
MS_RDONLY, MS_REC_PRIVATE = 1, 0x4000 | 0x40000
CALLS = {  # on x86-64 and on aarch64
    "pidfd_open": (434, 434),
    "memfd_create": (319, 279),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "kcmp": (312, 272),
    "membarrier": (324, 283),
    "sched_setaffinity": (203, 122),
    "mbind": (237, 235),
}


def check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# --- what encloses a rank -----------------------------------------------------------------------------------


def namespaces(*kinds):
    """With "pid", the rank is process 1 of its pid namespace; with "proc" too, /proc shows that one."""
    check(LIBC.unshare(sum(NAMESPACES[kind] for kind in {*kinds, "mount"} - {"proc"})))
    check(LIBC.mount(None, b"/", None, MS_REC_PRIVATE, None))
    if "pid" in kinds:
        go_on_in_child()
    if "proc" in kinds:
        mount("proc", "/proc")


def go_on_in_child():
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def user(number):
    """A user namespace in which this user has that number, or none, and all others have none."""
    own = os.geteuid()
    check(LIBC.unshare(NAMESPACES["user"]))
    if number is not None:
        with open("/proc/self/uid_map", "w") as file:
            file.write(f"{number} {own} 1")


def become():
    """Another user of the host, without privileges."""
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)


def mount(kind, at, *options):
    read_only = MS_RDONLY if "ro" in options else 0
    rest = ",".join(option for option in options if option != "ro")
    check(LIBC.mount(kind.encode(), at.encode(), kind.encode(), read_only, rest.encode()))


def forbid(*calls):
    """As a seccomp profile: these calls fail with EPERM."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    rules = [(0x20, 0, 0, 0)]  # the number of the call
    for at, call in enumerate(calls):
        rules.append((0x15, len(calls) - at, 0, CALLS[call][machine]))
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def limit(kind, most):
    """`most` counts from the process's own size for AS."""
    if kind == "AS":
        with open("/proc/self/statm") as file:
            most += int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))


def host(name):
    os.environ["NVX_HOST_ID"] = name


def end():
    """The rank ends after its first collective."""
    os.environ["ENDS"] = "1"


STEPS = {step.__name__: step for step in (namespaces, user, become, mount, forbid, limit, host, end)}


# --- a rank -------------------------------------------------------------------------------------------------


def use(place, rank, world):
    """A group and all-reduces of it, small and large, synchronous and not."""
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("nvx", store=dist.FileStore(place, world), rank=rank, world_size=world, timeout=timeout)
    total = world * (world + 1) / 2
    for count in (3, 300_000):
        values = torch.full((count,), rank + 1.0), torch.full((count,), rank + 1.0)
        dist.all_reduce(values[0])
        dist.all_reduce(values[1], async_op=True).wait()
        assert all(value.eq(total).all() for value in values), "wrong result"
        if "ENDS" in os.environ:
            os._exit(0)
    dist.destroy_process_group()


def run_rank(place, rank, boxes):
    os.umask(0)
    for step, *arguments in boxes[rank]:
        STEPS[step](*arguments)
    try:
        use(place, rank, len(boxes))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def run_cell(place, boxes):
    open(place, "wb").close()
    os.chmod(place, 0o666)  # a store for all users
    ranks = []
    for rank in range(len(boxes)):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(reader)
            os.dup2(2, 1)  # UCX prints there
            try:
                report = run_rank(place, rank, boxes)
            except OSError as error:
                report = f"impossible: {boxes[rank]}: {error}"
            os.write(writer, report.encode())
            os._exit(0)
        os.close(writer)
        ranks.append((pid, reader))
    return endings_of(ranks)


def endings_of(ranks):
    """Ends what hangs, and what waits for a rank that the machine does not enclose so."""
    pids, endings, end = {reader: pid for pid, reader in ranks}, {}, time.monotonic() + LIMIT
    while waiting := pids.keys() - endings.keys():
        ready = select.select(waiting, [], [], max(0.0, end - time.monotonic()))[0]
        for reader in ready or waiting:
            if not ready:
                os.kill(pids[reader], signal.SIGKILL)
            text = os.read(reader, 1 << 16).decode() if ready else "hangs"
            code = os.waitstatus_to_exitcode(os.waitpid(pids[reader], 0)[1])
            endings[reader] = text or f"ended with {code}"
            if text.startswith("impossible"):
                end = 0
    for reader in pids:
        os.close(reader)
    return [endings[reader] for _, reader in ranks]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="nvx-containers-") as folder:
        os.chmod(folder, 0o755)
        for number, boxes in enumerate(json.loads(sys.argv[1])):
            print(json.dumps(run_cell(f"{folder}/store{number}", boxes)), flush=True)
