"""`nvx drill`: injects faults into jobs of fresh processes, and checks the errors that the other ranks get.

A case is one fault in one phase over one backend. The last rank of the job has the fault. The others must get an error
in time that names that rank, destroy the group, make another one without that rank, and leave nothing behind. The exit
status is 1 if a case of nvx fails.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import functools
import gc
import json
import mmap
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import nvx

from .. import interrupts
from ..bench import hosts, machine
from ..bench.sizes import above
from . import Refused, refusing

PHASES = ("init", "first", "steady", "new_group", "async", "destroy")
CALLS = ("first", "steady", "async")
# name: (kind, description, phases in which it makes sense)
FAULTS = {
    "kill": ("ends", "SIGKILL", PHASES),
    "segv": ("ends", "SIGSEGV", PHASES),
    "exit": ("ends", "os._exit(3)", PHASES),
    "raise": ("ends", "an exception that ends the program", PHASES),
    "exec": ("ends", "exec of another program", PHASES),
    "stop": ("silent", "SIGSTOP", PHASES),
    "absent": ("silent", "lives and never makes the call", PHASES),
    "op": ("differs", "calls another collective", (*CALLS, "new_group")),
    "dtype": ("differs", "another dtype", CALLS),
    "size": ("differs", "another number of elements; of ranks in init and new_group", (*CALLS, "init", "new_group")),
    "root": ("differs", "another root", CALLS),
    "order": ("differs", "two collectives in the other order", CALLS),
    "memory": ("limit", "may map no more memory", PHASES),
    "descriptors": ("limit", "may open no more descriptors", PHASES),
    "link": ("link", "the link of its host goes down; needs root", PHASES),
}
LEAD = 0.15  # seconds between the others' call and the fault
LEAVES = 2.0  # seconds after which a new name in /dev/shm is left over; those of other programs come and go
SETTLES = 6.0  # seconds that an idle thread of nvx lives
GRACE = 40.0  # seconds beyond the limit after which a rank hangs
LIVENESS = 2.0  # NVX_LIVENESS_S in the cases with a link
SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl(2)
prctl = ctypes.CDLL(None).prctl


@dataclasses.dataclass
class Case:
    backend: str
    fault: str
    phase: str
    ranks: int
    folder: str = ""

    def __post_init__(self):
        self.kind = FAULTS[self.fault][0]
        # A rank that lives may still make its call, so only a timeout shows it.
        waits = self.kind == "silent" or (self.kind == "differs" and self.phase in ("init", "new_group"))
        self.timeout = 2.0 if waits else 6.0
        detection = self.timeout if waits else LIVENESS + 1 if self.kind == "link" else 0.0
        self.limit = 1.0 + (detection if self.phase != "destroy" else 0.0)  # seconds from the fault to the last error


def held():
    """The descriptors of this process by kind, and its threads."""
    kinds = collections.Counter(threads=len(os.listdir("/proc/self/task")))
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = re.sub(r"[\d\[\]]", "", os.readlink(f"/proc/self/fd/{file}")).strip(":")
            # One of each for a process is not counted: the lock that shows that it lives, and its page or trace.
            kinds[kind] += not re.search("/memfd:nvx-(lock|status) |/nvx-trace[.]", kind)
    return kinds


def shared_names():
    """Of files in /dev/shm; nvx makes none, and does without the folder."""
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


def fail():
    raise RuntimeError("injected")


def forbid_memory():
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 10), resource.RLIM_INFINITY))


def forbid_descriptors():
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


INJECTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": fail,
    "exec": lambda: os.execvp("sleep", ["sleep", "60"]),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "absent": lambda: time.sleep(60),
    "memory": forbid_memory,
    "descriptors": forbid_descriptors,
}


class FaultyStore(dist.Store):
    """Calls `inject` after this rank's first record: the others know the rank, which never completes the set-up."""

    def __init__(self, store, inject):
        super().__init__()
        self.store, self.inject = store, inject

    def set(self, key, value):
        self.store.set(key, value)
        inject, self.inject = self.inject, bool
        inject()


for _name in ("get", "add", "check", "wait", "compare_set", "delete_key", "append", "multi_get", "multi_set"):
    setattr(FaultyStore, _name, lambda self, *given, name=_name: getattr(self.store, name)(*given))


class Rank:
    """`shared`: the time of the fault, and the port of the store."""

    def __init__(self, case, rank, shared, network):
        torch.set_num_threads(1)
        self.case, self.rank, self.shared, self.network = case, rank, shared, network
        self.faulty = rank == case.ranks - 1
        self.fault = case.fault if self.faulty else ""
        if network:
            hosts.enter(network.name(int(self.faulty)))
            os.environ.update(network.environment(), NVX_LIVENESS_S=str(LIVENESS))
            self.store = dist.FileStore(os.path.join(case.folder, "store"), case.ranks)
        else:
            while not shared[1]:
                time.sleep(0.001)
            self.store = dist.TCPStore("127.0.0.1", int(shared[1]), is_master=False, wait_for_workers=False)
            self.store.set_timeout(datetime.timedelta(seconds=case.timeout))

    def begin(self, store, ranks, seconds):
        limit = datetime.timedelta(seconds=seconds)
        dist.init_process_group(self.case.backend, store=store, rank=self.rank, world_size=ranks, timeout=limit)

    def inject(self):
        """In `destroy` the fault comes before the others' call, otherwise while they are inside."""
        time.sleep(LEAD if self.faulty == (self.case.phase != "destroy") else 0)
        self.entered = time.monotonic()
        if self.faulty:
            self.shared[0] = self.entered
            self.network.set_link(1, "down") if self.network else INJECTIONS.get(self.fault, bool)()

    def calls(self, size):
        """The collectives of a phase. Those of the faulty rank differ if that is the fault."""
        kind = torch.int32 if self.fault == "dtype" else torch.float32
        self.sums = [torch.ones(size + (self.fault == "size"), dtype=kind) for _ in range(2)]
        sums = [functools.partial(dist.all_reduce, x) for x in self.sums]
        broadcast = functools.partial(dist.broadcast, torch.ones(size), int(self.fault == "root"))
        if self.case.fault == "root" or self.fault == "op":
            return [broadcast]
        if self.case.fault == "order":
            return [broadcast, sums[0]] if self.faulty else [sums[0], broadcast]
        return sums

    def enter(self, phase):
        """The phase, with the fault. Returns whether the results are right."""
        calls, store, kind = self.calls(1000 if phase == "first" else 1 << 20), self.store, self.case.kind
        inside = phase == "async" and kind in ("ends", "silent", "link")
        if phase == "init" and kind in ("ends", "silent") and self.fault not in ("", "absent"):
            store = FaultyStore(store, self.inject)
        elif not inside:
            self.inject()
        if phase == "destroy":
            dist.destroy_process_group()
            return True
        if phase == "init":
            self.begin(store, self.case.ranks + (self.fault == "size"), self.case.timeout)
        if phase == "new_group" and self.fault != "op":
            members = [0, self.rank] if self.fault == "size" else None
            group = dist.new_group(members, timeout=datetime.timedelta(seconds=self.case.timeout))
            dist.all_reduce(torch.ones(1000), group=group)
        works = [call(async_op=phase == "async") for call in calls]
        if inside:
            self.inject()
        for work in filter(None, works):
            work.wait()
        dist.barrier()  # a rank whose own call could return gets the error here
        return all(bool(x.eq(self.case.ranks).all()) for x in self.sums)

    def run(self):
        if self.network:
            self.begin(dist.PrefixStore("before", self.store), self.case.ranks, self.case.timeout)
            dist.barrier()
            dist.destroy_process_group()  # a process keeps its link to other hosts until it ends
        before, outcome = held(), {"error": "", "right": True}
        if self.case.phase != "init":
            self.begin(self.store, self.case.ranks, self.case.timeout)
        for _ in range(0 if self.case.phase in ("init", "first") else 50):
            dist.all_reduce(torch.ones(1000))
        self.entered = time.monotonic()
        try:
            outcome["right"] = self.enter(self.case.phase)
        except Exception as error:
            if self.fault == "raise":
                raise
            outcome["error"] = str(error) or type(error).__name__
        outcome["seconds"] = time.monotonic() - max(self.entered, self.shared[0])
        yield outcome
        if self.faulty:
            time.sleep(60)  # until the drill ends it
        began, ranks, total = time.monotonic(), self.case.ranks - 1, torch.ones(1000)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store.set_timeout(datetime.timedelta(seconds=GRACE))  # another survivor may detect the fault much later
        self.begin(dist.PrefixStore("again", self.store), ranks, GRACE)
        dist.all_reduce(total)
        outcome["again_s"] = time.monotonic() - began if bool(total.eq(ranks).all()) else None
        dist.destroy_process_group()
        gc.collect()
        end = time.monotonic() + SETTLES
        while (left := held() - before) and time.monotonic() < end:
            time.sleep(0.02)
        yield outcome | {"left": left}


def start_rank(case, rank, shared, network):
    """Forks a rank, which dies with the command. It ends as programs end: through the frames of its parent."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(os.path.join(case.folder, f"log{rank}"), os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for outcome in Rank(case, rank, shared, network).run():
        with open(os.path.join(case.folder, f"outcome{rank}"), "w") as file:
            json.dump(outcome, file)
    sys.exit(0)


def await_ranks(pids, seconds):
    """The exit codes of the survivors; None for those that still run when the time is up. Ends all ranks."""
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(pids) - 1 and time.monotonic() < end:
        for rank, pid in enumerate(pids[:-1]):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.005)
    for rank in set(range(len(pids))) - set(codes):
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return [codes.get(rank) for rank in range(len(pids) - 1)]


def run(case):
    """Runs a case and returns its row. This process is the parent of all processes that ranks leave behind."""
    os.mkdir(case.folder)
    names, shared = shared_names(), memoryview(mmap.mmap(-1, 4096)).cast("d")
    with hosts.Hosts(2) if case.kind == "link" else contextlib.nullcontext() as network:  # a rank leaves it too
        pids = [start_rank(case, rank, shared, network) for rank in range(case.ranks)]
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared[1] = server.port
        codes = await_ranks(pids, case.limit + 2 * GRACE)
    made, end = shared_names() - names, time.monotonic() + LEAVES
    while made and time.monotonic() < end:
        time.sleep(0.02)
        made &= shared_names()
    orphans = []
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:  # some kernels lack it
        orphans = [int(pid) for pid in file.read().split()]
    left = collections.Counter(processes=len(orphans), shm=len(made))
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    outcomes = [{} for _ in codes]
    for rank, report in enumerate(outcomes):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(case.folder, f"outcome{rank}")) as file:
            report.update(json.load(file))
    return judge(case, pids[-1], outcomes, codes, left)


def judge(case, pid, outcomes, codes, left):
    """The row of a case. `short` lists the reasons why it failed; `works` means that the fault had no effect."""
    errors, times = [one.get("error", "") for one in outcomes], [one.get("seconds") for one in outcomes]
    again = [one.get("again_s") for one in outcomes]
    named = all(re.search(rf"\b(rank {case.ranks - 1}|pid {pid})\b", error) for error in errors)
    row = {"fault": case.fault, "phase": case.phase, "backend": case.backend, "limit": case.limit, "named": named}
    first = re.split(r"\n|  At: ", next(filter(None, errors), ""))[0]  # without the frames of Python or C++
    row |= {"seconds": None, "error": first[:500], "works": False}
    for one in outcomes:
        left.update(one.get("left", {}))
    row |= {"again_s": None if None in again else round(max(again), 3), "left": {k: n for k, n in left.items() if n}}
    if None in times:
        code = codes[times.index(None)]
        return row | {"short": ["hangs" if code is None else f"another rank dies ({code})"]}
    row["seconds"], quiet = round(max(0.0, *times), 3), not any(errors)
    row["works"] = quiet and case.kind == "limit" and case.phase != "destroy" and all(one["right"] for one in outcomes)
    faults = {
        "an error": case.phase == "destroy" and not quiet,
        "no error": case.phase != "destroy" and quiet and not row["works"],
        "no name": not quiet and not named,
        "late": row["seconds"] > case.limit and not row["works"],
        "no new group": row["again_s"] is None,
        f"ends with {codes}": any(code != 0 for code in codes),
        "leaves " + ", ".join(f"{n} {k}" for k, n in row["left"].items()): bool(row["left"]),
    }
    return row | {"short": [words for words, holds in faults.items() if holds]}


def verdict(row):
    """A row in a few words."""
    took = "works" if row["works"] else "" if row["seconds"] is None else f"{row['seconds']:.2f} s"
    return "; ".join(filter(None, [took, *row["short"]]))


def main(arguments=None):
    options = parse(arguments)
    if "link" in options.fault and (why := hosts.why_no_namespaces()):
        options.fault = [fault for fault in options.fault if fault != "link"]
        print(f"nvx drill: no faults of links: {why}", file=sys.stderr)
    cases = [(fault, phase) for fault in options.fault for phase in options.phase if phase in FAULTS[fault][2]]
    if not cases:
        sense = "; ".join(f"{fault}: {', '.join(FAULTS[fault][2])}" for fault in options.fault)
        raise Refused("no case ran" + f". Phases in which a fault makes sense: {sense}" * bool(sense))
    if options.json:
        with refusing(OSError):
            machine.check_writable(options.json)
    nvx._load()
    nvx.stand_in.serve_none()
    gc.collect()
    gc.freeze()  # halves the time of a rank's exit
    prctl(SUBREAPER, 1)
    own, folder, rows = os.getpid(), tempfile.mkdtemp(prefix="nvx-drill-"), []
    with interrupts.interruptible():
        try:
            for fault, phase in cases:
                print(f"{fault:12}{phase:10}", end="", flush=True)
                for backend in filter(None, ["nvx", options.vs]):
                    rows.append(run(Case(backend, fault, phase, options.ranks, f"{folder}/{len(rows)}")))
                    print(f" {backend}: {verdict(rows[-1]):36}", end="", flush=True)
                print(flush=True)
        finally:
            if os.getpid() == own:  # not in a rank that ends
                shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        command = shlex.join(["nvx", "drill", *(sys.argv[2:] if arguments is None else arguments)])
        machine.write(options.json, machine.document("drill", command, vars(options), rows=rows))
    nvx_rows = [row for row in rows if row["backend"] == "nvx"]
    short = sum(bool(row["short"]) for row in nvx_rows)
    print(f"{len(nvx_rows)} case{'s' * (len(nvx_rows) != 1)} over nvx, {short} failed")
    return 1 if short else 0


def parse(arguments):
    about, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="nvx drill", description=about.partition(": ")[2].capitalize(), epilog=how)
    names = "; ".join(f"{name}: {text}" for name, (_, text, _) in FAULTS.items())
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help=names)
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument("--vs", metavar="BACKEND", help="also run every case over this backend, such as gloo")
    parser.add_argument("-n", "--ranks", type=above(2), default=3, help="processes of a job (default 3)")
    parser.add_argument("-J", "--json", metavar="FILE", help="write the rows and the errors to this file")
    options = parser.parse_args(arguments)
    if options.vs and options.vs not in dist.Backend.backend_list:
        parser.error(f"--vs: torch {torch.__version__} knows no backend {options.vs!r}")
    return options
