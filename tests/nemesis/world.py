"""Runs worlds: processes of ranks that serve one world after the other, faults from outside, the limit."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any

import torch.distributed as dist

from tests.nemesis.judge import judge, unexpected_ends
from tests.nemesis.rank import SETUP, leaves, serve

LIMIT = 60.0  # seconds that a world may take


@dataclass(eq=False)
class Member:
    """A process for ranks, seen from the runner."""

    process: multiprocessing.Process
    connection: object
    stacks: str
    host: str
    ready: bool = False  # it has connected to the store

    def log(self):
        """Returns the text that the process has written to stderr, with its stacks."""
        with open(self.stacks) as log:
            return log.read()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):  # a fault of its own may have ended it
            os.kill(self.process.pid, number)

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.join(10)
        self.connection.close()


@dataclass
class Seen:
    """A rank in a world, as far as it has come."""

    member: Member
    history: list | None = None
    grown: list | None = None  # of the resources that the process holds; None: it is not done
    code: int | None = None
    continues_at: float | None = None
    killed: bool = False

    @property
    def reusable(self):
        """torch numbers groups anew only after an init_process_group that succeeded."""
        set_up = self.history is not None and all(e.outcome == "ok" for e in self.history if e.step == SETUP)
        return self.grown is not None and set_up and not self.killed

    @property
    def over(self):
        return self.grown is not None or self.code is not None


class Worlds:
    """The pool. `fresh`: every world gets processes of its own."""

    def __init__(self, fresh=False):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.fresh, self.members, self.number = fresh, [], 0
        self.folder = tempfile.mkdtemp(prefix="nvx-nemesis-")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "tests.nemesis.rank"])
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def close(self):
        for member in self.members:
            member.end()
        self.members.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, program):
        """Runs a program and returns the violations."""
        self.number += 1
        if self.fresh:
            self._drop(list(self.members))
        ranks = {rank: Seen(member) for rank, member in enumerate(self._members(program))}
        for rank, seen in ranks.items():
            seen.member.connection.send((program, rank, f"world{self.number}"))
        found = self._watch(program, ranks)
        found += judge(program, {r: s.history for r, s in ranks.items() if s.history is not None})
        ended = list(unexpected_ends(program, {r: s.code for r, s in ranks.items() if s.code is not None}))
        found += ended + [s.member.log() for s in ranks.values() if ended and s.code is not None]
        for rank, seen in ranks.items():
            found += [f"I4 rank {rank} holds {text}" for text in seen.grown or []]
        self._drop([s.member for s in ranks.values() if found or not s.reusable])
        return found

    def _members(self, program):
        chosen = []
        for rank in range(program.world):
            host = f"host{rank % program.hosts}" if program.hosts > 1 else ""
            known = (m for m in self.members if m.host == host and m not in chosen)
            chosen.append(next(known, None) or self._start(host))
        for member in chosen:
            if not member.ready:
                member.ready = member.connection.recv()
        return chosen

    def _start(self, host):
        ours, theirs = self.context.Pipe()
        stacks = os.path.join(self.folder, f"stacks-{self.number}-{len(self.members)}")
        process = self.context.Process(target=serve, args=(theirs, host, stacks, self.server.port))
        process.start()
        theirs.close()
        self.members.append(Member(process, ours, stacks, host))
        return self.members[-1]

    def _drop(self, members):
        for member in members:
            member.end()
            self.members.remove(member)

    def _watch(self, program, ranks):
        began = time.monotonic()
        due = sorted(((began + f.after, f) for f in program.faults if "outside" in f.kind), key=lambda d: d[0])
        announced = False
        while not all(seen.over for seen in ranks.values()):
            now = time.monotonic()
            if now - began > LIMIT:
                return [self._hung(rank, seen) for rank, seen in ranks.items() if not seen.over]
            self._interfere(ranks, due, now)
            if not announced and all(s.history is not None or s.over for s in ranks.values()):
                announced = True
                for rank, seen in ranks.items():
                    if not seen.over and not leaves(program, rank):  # that one would take it for the next program
                        with contextlib.suppress(OSError):
                            seen.member.connection.send("all have run it")
            self._receive(ranks, 0.005 if due or any(s.continues_at for s in ranks.values()) else 0.5)
        return []

    def _interfere(self, ranks, due, now):
        while due and now >= due[0][0]:
            _, fault = due.pop(0)
            seen = ranks[fault.rank]
            if fault.kind.startswith("SIGKILL"):
                seen.killed = True
                seen.member.signal(signal.SIGKILL)
            elif not seen.over and not seen.continues_at:
                seen.member.signal(signal.SIGSTOP)
                seen.continues_at = now + fault.value
        for seen in ranks.values():
            if seen.continues_at and now >= seen.continues_at:
                seen.continues_at = None
                seen.member.signal(signal.SIGCONT)

    def _receive(self, ranks, seconds):
        live = [s for s in ranks.values() if not s.over]
        sources = [s.member.connection for s in live] + [s.member.process.sentinel for s in live]
        ready = wait_for_any(sources, seconds)
        for seen in live:
            try:
                while seen.member.connection in ready and seen.member.connection.poll():
                    self._take(seen, seen.member.connection.recv())
            except (EOFError, OSError):
                seen.member.process.join(10)
            if seen.member.process.exitcode is not None and not seen.over:
                seen.code = seen.member.process.exitcode

    def _take(self, seen, message):
        kind, value, *more = message
        if kind == "stopped":
            seen.continues_at = time.monotonic() + value
        elif kind == "ran":
            seen.history = value
        else:
            seen.grown, seen.history = value, *more

    def _hung(self, rank, seen):
        seen.member.signal(signal.SIGCONT)
        seen.member.signal(signal.SIGUSR1)
        time.sleep(0.3)
        return f"I3 rank {rank} hangs, {'leaving' if seen.history is not None else 'running'}\n{seen.member.log()}"
