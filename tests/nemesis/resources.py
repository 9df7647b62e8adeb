"""Runs out of resources: python -m tests.nemesis.resources [--hosts 2] [FUNCTION ...]

For each function of the C library and n = 1, 2, ..., the n-th call that nvx makes of it fails on rank 0 of two. Then
both ranks must have the right results, or errors that say why; nothing may hang, crash or leak, and both must work in
another group afterwards. Ends where nvx makes no n-th call.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

FUNCTIONS = """memfd_create ftruncate fallocate mmap socket bind listen connect accept4 sendmsg recvmsg eventfd
epoll_create1 epoll_ctl pthread_create pidfd_open""".split()
REASONS = "Too many open files|Cannot allocate memory|No space left|No buffer space|Resource temporarily|not permitted"
HERE = Path(__file__).parent
LIMIT = 20.0  # seconds that a pair of ranks may take
TIMEOUT = 3.0
MOST = 40  # calls of a function that are tried


def build(folder):
    """The library to preload."""
    library = Path(folder) / "failing_calls.so"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "failing_calls.cc", "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library):
    return {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


# --- a rank -------------------------------------------------------------------------------------------------


def group_of(where, rank, name):
    from datetime import timedelta

    import torch.distributed as dist
    from nvx._C import ProcessGroupNVX

    options = ProcessGroupNVX.Options(timeout=timedelta(seconds=TIMEOUT))
    options.group_name = name
    return ProcessGroupNVX(dist.PrefixStore(name, dist.FileStore(where, 2)), rank, 2, options)


def use(where, rank, name):
    """Everything once: makes a group, and collectives, asynchronous ones and messages of it, small and large."""
    import torch

    group = group_of(where, rank, name)
    try:
        for count in (3, 300_000):
            total = torch.full((count,), rank + 1.0)
            group.allreduce([total]).wait()
            assert total.eq(3).all(), "wrong result"
            works = [group.allreduce([torch.ones(count)]) for _ in range(2)]
            got = torch.zeros(count)
            works += [group.send([total], 1 - rank, 0), group.recv([got], 1 - rank, 0)]
            for work in works:
                work.wait()
            assert got.eq(3).all(), "wrong message"
    finally:
        group.shutdown()


def rank_of(where, rank, hosts, function, n):
    """Returns how each group of a rank ended, whether the call has failed, and how many descriptors the rank holds."""
    if hosts > 1:
        os.environ["NVX_HOST_ID"] = f"host{rank}"
    shim = ctypes.CDLL(None)
    report = {"ended": []}
    for turn in range(2):
        if rank == 0:
            shim.nvx_fail(function.encode() if turn == 0 else b"", n)
        began = time.monotonic()
        try:
            use(f"{where}.{turn}", rank, f"turn {turn}")
            ended = "ok"
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        report["ended"].append([ended, round(time.monotonic() - began, 2)])
        if turn == 0:
            report["failed"] = rank == 0 and bool(shim.nvx_failed())
            sync(where, rank)
    report["descriptors"] = min(descriptors() for _ in range(5))  # a thread that ends may still close one
    return report


def descriptors():
    time.sleep(0.02)
    return len(os.listdir("/proc/self/fd"))


def sync(where, rank):
    """Both come here before the next group, so that none waits there for the other's timeout."""
    Path(f"{where}.synced{rank}").touch()
    end = time.monotonic() + LIMIT
    while not Path(f"{where}.synced{1 - rank}").exists() and time.monotonic() < end:
        time.sleep(0.002)


# --- the pair -----------------------------------------------------------------------------------------------


def pair(folder, hosts, function, n):
    """Forks two ranks from this process, which has loaded nvx, and returns their reports, or how they ended."""
    where, ranks = f"{folder}/{function}.{n}", []
    for rank in range(2):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                os.write(writer, json.dumps(rank_of(where, rank, hosts, function, n)).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)  # the sweep is the parent's
        os.close(writer)
        ranks.append((pid, reader))
    end, reports = time.monotonic() + LIMIT, []
    for pid, reader in ranks:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
        text = os.read(reader, 1 << 16) if ready else b""
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        reports.append(json.loads(text) if text else {"status": status, "hung": not ready})
    return reports


def sweep(functions, hosts):
    """One line of JSON for each pair."""
    import nvx._C  # noqa: F401
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for function in functions:
            for n in range(MOST + 1):
                reports = pair(folder, hosts, function, n)
                print(json.dumps({"function": function, "hosts": hosts, "n": n, "reports": reports}), flush=True)
                if n and "failed" in reports[0] and not reports[0]["failed"]:
                    break


def run(functions, library, hosts=1):
    """The lines of all sweeps. n = 0 is a pair without a failure."""
    command = [sys.executable, "-m", "tests.nemesis.resources", "--sweep", "--hosts", str(hosts), *functions]
    out = subprocess.run(command, env=environment(library), capture_output=True, text=True, cwd=HERE.parents[1])
    yield from map(json.loads, out.stdout.splitlines())
    if out.returncode:
        yield {"function": "all", "n": -1, "reports": [], "broken": out.stderr[-2000:]}


def wrong(line, usual):
    """Why a line shows a defect, or None. `usual`: what the ranks hold without a failure."""
    import re

    if "broken" in line:
        return line["broken"]
    for rank, report in enumerate(line["reports"]):
        if "status" in report:
            return f"rank {rank} {'hangs' if report['hung'] else 'ended with status ' + str(report['status'])}"
        (first, _), (second, _) = report["ended"]
        if second != "ok":
            return f"rank {rank} cannot make another group: {second}"
        if first != "ok" and "nvx" not in first:
            return f"rank {rank}'s error is not nvx's: {first}"
        # Connections to other hosts are made as they are needed, and close in the background.
        if report["descriptors"] > usual[rank]["descriptors"] + (0 if line["hosts"] == 1 else 4):
            return f"rank {rank} holds {report['descriptors']} descriptors, not {usual[rank]['descriptors']}"
    errors = [report["ended"][0][0] for report in line["reports"]]
    if line["reports"][0]["failed"] and errors != ["ok", "ok"] and not any(re.search(REASONS, e) for e in errors):
        return f"no error names the reason: {errors}"
    return None


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis.resources", description=__doc__.partition(":")[2])
    parser.add_argument("functions", nargs="*", default=FUNCTIONS)
    parser.add_argument("--hosts", type=int, default=1, help="2: each rank on a host of its own, by name")
    parser.add_argument("--sweep", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sweep:
        sweep(options.functions, options.hosts)
        return 0
    defects, usual = 0, None
    with tempfile.TemporaryDirectory() as folder:
        for line in run(options.functions, build(folder), options.hosts):
            usual = line["reports"] if line["n"] == 0 else usual
            why = wrong(line, usual)
            defects += bool(why)
            ends = [t.get("ended", ["?"])[0] for t in line["reports"]]
            print(f"{line['function']} {line['n']}: {'DEFECT ' + why if why else 'fine'} {ends}")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
