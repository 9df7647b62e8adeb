"""Ranks of one machine in containers of every kind: they work, or each has an error that states what to do. See
containers.py."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

pytest.importorskip("nvx._C", reason="nvx is not built")

import warm

from tests.hosts.world import ROOT

WORKS = "works"
OPEN = []
ALL = ["namespaces", "pid", "proc", "ipc", "uts"]
ANOTHER_PROC = ["namespaces", "pid"]
OLD_PROFILE = ["forbid", *"pidfd_open process_vm_readv process_vm_writev ptrace kcmp membarrier mbind".split()]
NO_USER = "is also the number of all users .* Next: run as another user"
NO_PROC = [["namespaces"], ["mount", "tmpfs", "/proc"]]
TWO_HOSTS = "rank 1 .* cannot read /proc/.*/boot_id, so it .* another host than rank 0 .* Next: if they are on one"
FEW_FILES = "Too many open files|rank [01] .*see its log"  # a rank that can open no file cannot notify the others
NO_MEMORY = r"make shared memory \(memfd_create\).*Next: check whether .* the container's seccomp profile forbids"

# The boxes of the ranks, and how they end: all of them, or each of them.
CELLS = {
    "in nothing": ([OPEN, OPEN], WORKS),
    "in namespaces of their own": ([[ALL], [ALL], [ALL]], WORKS),
    "one inside": ([OPEN, [ALL]], WORKS),
    "an old seccomp profile": ([[OLD_PROFILE], [OLD_PROFILE]], WORKS),
    "an old seccomp profile, one pid namespace each": ([[ALL, OLD_PROFILE], [ALL, OLD_PROFILE]], WORKS),
    "one ends in its pid namespace": ([[ALL], [ALL, ["end"]]], ["rank 1 .* has ended.*Next: ", "ended with 0"]),
    "one ends, nobody has pidfd_open": (
        [[ALL, OLD_PROFILE], [ALL, OLD_PROFILE, ["end"]]],
        ["rank 1 .* has ended.*Next: ", "ended with 0"],
    ),
    "one ends, /proc shows other processes": (
        [[ANOTHER_PROC], [ANOTHER_PROC, ["end"]], [ANOTHER_PROC]],
        ["rank 1 .* has ended.*Next: ", "ended with 0", "rank 1 .* has ended.*Next: "],
    ),
    "no memfd_create": ([[["forbid", "memfd_create"]]] * 2, NO_MEMORY),
    "no memfd_create on one": ([OPEN, [["forbid", "memfd_create"]]], NO_MEMORY),
    "user namespaces, root": ([[["user", 0]], [["user", 0]]], WORKS),
    "user namespaces, other numbers": ([[ALL, ["user", 1000]], [["user", 5]], OPEN], WORKS),
    "the number of unmapped users": ([OPEN, [["user", 65534]]], NO_USER),
    "no number": ([[["user", None]], [["user", None]]], NO_USER),
    "another user": ([OPEN, [["become"]]], "Operation not permitted.* Next: see its log; run all ranks .* as one user"),
    "without privileges": ([[["become"]], [["become"]]], WORKS),
    "one network namespace each": (
        [[["namespaces", "net"], ["host", "a"]]] * 2,
        "different network namespaces, where they cannot share memory.*Next: give the ranks of each .* NVX_HOST_ID",
    ),
    "a read-only /dev/shm": ([[["namespaces"], ["mount", "tmpfs", "/dev/shm", "ro"]]] * 2, WORKS),
    "a /dev/shm of a page": ([[["namespaces"], ["mount", "tmpfs", "/dev/shm", "size=4k"]]] * 2, WORKS),
    "no /proc": ([NO_PROC] * 2, WORKS),
    "no /proc on one": ([OPEN, NO_PROC], TWO_HOSTS),
    "no /proc on one, one host by name": ([[["host", "a"]], [["host", "a"], *NO_PROC]], WORKS),
    "no /sys": ([[["namespaces"], ["mount", "tmpfs", "/sys"]]] * 2, WORKS),
    "40 descriptors": ([[["limit", "NOFILE", 40]]] * 2, WORKS),
    "16 ranks that all pass descriptors at once, more than the limit": (
        [[["become"], ["limit", "NOFILE", 128]]] * 16,
        WORKS,
    ),
    "12 descriptors": ([[["limit", "NOFILE", 12]]] * 2, FEW_FILES),
    "12 descriptors on one": ([OPEN, [["limit", "NOFILE", 12]]], [FEW_FILES, "Too many open files"]),
    "little address space": ([[["limit", "AS", 1 << 29]]] * 2, "Next: raise or remove .*ulimit -v"),
    "little address space on one": ([OPEN, [["limit", "AS", 1 << 29]]], "Next: raise or remove .*ulimit -v"),
    "some address space": ([[["limit", "AS", 1 << 32]]] * 2, WORKS),
    "no threads": ([[["become"], ["limit", "NPROC", 1]]] * 2, WORKS),
    "no threads between hosts": (
        [[["become"], ["host", name], ["limit", "NPROC", 1]] for name in "ab"],
        "cannot start a thread for the link to other hosts.*Next: raise the limit of threads",
    ),
    "no locked memory": ([[["become"], ["limit", "MEMLOCK", 0]]] * 2, WORKS),
    "no queued signals": ([[["become"], ["limit", "SIGPENDING", 0]]] * 2, WORKS),
    "small files": ([[["limit", "FSIZE", 1 << 20]]] * 2, "Next: raise the file size limit"),
    "small files on one": ([OPEN, [["limit", "FSIZE", 1 << 20]]], "Next: raise the file size limit"),
    "small stacks": ([[["limit", "STACK", 1 << 16]]] * 2, WORKS),
}


@pytest.fixture(scope="module")
def endings():
    """How the ranks of each cell ended. All cells run in one go, as the start of the process costs most."""
    if os.geteuid() != 0:
        pytest.skip("only root can make containers")
    command = ["-m", "tests.hosts.containers", json.dumps([boxes for boxes, _ in CELLS.values()])]
    ended = warm.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(CELLS, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_work_or_get_advice(endings, cell):
    boxes, expected = CELLS[cell]
    expected = [expected] * len(boxes) if isinstance(expected, str) else expected
    if impossible := next((ending for ending in endings[cell] if ending.startswith("impossible")), None):
        pytest.skip(impossible)
    for rank, (ending, words) in enumerate(zip(endings[cell], expected, strict=True)):
        assert re.search(words, ending, re.DOTALL), f"rank {rank}: {ending}\n{endings[cell]}"
