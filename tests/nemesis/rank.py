"""One rank of a world: runs the program, does its faults, and reports the history of its calls."""

import ctypes
import faulthandler
import os
import random
import signal
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.nemesis import program as programs

PR_SET_PDEATHSIG = 1
SETUP = -1  # the step of init_process_group and new_group
WARM = 4  # worlds after which a process holds what it keeps
GROWTH = {"descriptors": 12, "threads": 16, "mappings": 8, "children": 0}  # beyond that


@dataclass
class Event:
    """The end of a call: "ok", "wrong" or "error"."""

    step: int
    group: int
    outcome: str
    text: str = ""
    seconds: float = 0.0
    issued_after_failure: bool = False


class ProgramRunner:
    def __init__(self, program, rank, notify):
        self.program, self.rank, self.notify = program, rank, notify
        self.expected = programs.Expected(program)
        self.groups, self.events, self.pending, self.failed, self.gone = [], [], [], set(), set()

    # --- the life of a world

    def set_up(self, store):
        period = timedelta(seconds=self.program.timeout)

        def make():
            dist.init_process_group("nvx", store=store, rank=self.rank, world_size=self.program.world, timeout=period)
            self.groups = [dist.group.WORLD]
            for members in self.program.groups[1 : self.program.early]:
                self.groups.append(dist.new_group(list(members), timeout=period))

        self.set_up_well = self.noted(SETUP, 0, make)
        return self.set_up_well

    def run(self):
        for step in self.program.steps:
            for fault in self.program.faults_of(self.rank, step.number):
                if self.suffer(fault, step) == "leaves":
                    return
            if step.kind == "wait":
                self.wait_for(self.some_pending(step))
                continue
            if step.kind == "new_group":
                self.make_group(step)
                continue
            if self.rank not in self.program.groups[step.group] or step.group in self.gone:
                continue
            faults = [f.kind for f in self.program.faults_of(self.rank, step.number)]
            if "skips" in faults:
                continue
            for kind in faults:
                step = programs.changed(step, kind, len(self.program.groups[step.group]))
            self.begin(step)
        self.wait_for(self.some_pending(None))

    def some_pending(self, step):
        """Works in an order of this rank's own: half of them, or all."""
        chance = random.Random(f"{self.program.seed} {self.rank} {step and step.number}")
        chosen = [work for work in self.pending if step is None or chance.random() < 0.5]
        self.pending = [work for work in self.pending if work not in chosen]
        chance.shuffle(chosen)
        return chosen

    def wait_for(self, works):
        for step, after, handle, check in works:
            self.noted(step.number, step.group, lambda h=handle, c=check: (h.wait(), c()), after)

    def noted(self, number, group, call, after_failure=None):
        """Makes a call and notes how it ended."""
        after_failure = group in self.failed if after_failure is None else after_failure
        began = time.monotonic()
        try:
            wrong = call()
            wrong = wrong[-1] if isinstance(wrong, tuple) else wrong
            event = Event(number, group, "wrong" if wrong else "ok", wrong or "")
        except Exception as error:
            event = Event(number, group, "error", f"{type(error).__name__}: {error}")
            if isinstance(error, dist.DistBackendError):
                self.failed.add(group)
        event.seconds, event.issued_after_failure = time.monotonic() - began, after_failure
        self.events.append(event)
        return event.outcome == "ok"

    def go_on(self):
        """The survivors of deaths, and of nothing else, make a group without the dead and use it."""
        dead = self.program.surely_dead()
        if not dead:
            return

        def shrink():
            dist.shrink_group(dead, shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
            total = torch.tensor([self.rank + 1])
            dist.all_reduce(total)
            left = sum(rank + 1 for rank in range(self.program.world) if rank not in dead)
            return None if total.item() == left else f"the survivors' sum is {total.item()}, not {left}"

        if not self.noted(SETUP, 0, shrink, False):
            self.events[-1].outcome = "wrong"

    # --- faults

    def suffer(self, fault, step):
        kind = fault.kind
        if kind == "os._exit":
            os._exit(3)
        if kind in ("SIGKILL", "SIGSEGV"):
            faulthandler.disable()
            os.kill(os.getpid(), getattr(signal, kind))
            time.sleep(60)
        if "stop" in kind:
            self.notify(("stopped", fault.value))
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "late":
            time.sleep(fault.value)
        if step.group >= len(self.groups) or step.group in self.gone:
            return kind
        if kind in ("aborts", "destroys") and self.groups[step.group]:
            self.give_up(kind, step)
        if kind == "bad argument":
            self.refused(step)
        return kind

    def give_up(self, kind, step):
        group = step.group
        self.gone.add(group)
        if kind == "aborts":
            self.groups[group]._get_backend(torch.device("cpu")).abort()
            self.failed.add(group)
            self.noted(step.number, group, lambda: dist.barrier(self.groups[group]), True)
        elif group:
            dist.destroy_process_group(self.groups[group])
        else:
            self.groups[0]._get_backend(torch.device("cpu")).shutdown()

    def refused(self, step):
        """A call with a bad argument: it raises and changes nothing. After a failure it may report that instead."""
        try:
            dist.all_gather_into_tensor(torch.zeros(1), torch.zeros(1), group=self.groups[step.group])
        except ValueError:
            return
        except dist.DistBackendError:
            if step.group in self.failed:
                return
        self.events.append(Event(step.number, step.group, "wrong", "a bad argument was not refused"))

    # --- calls

    def make_group(self, step):
        members, period = list(self.program.groups[step.group]), timedelta(seconds=self.program.timeout)
        if not self.noted(step.number, step.group, lambda: self.groups.append(dist.new_group(members, timeout=period))):
            self.groups.append(None)

    def begin(self, step):
        if step.group >= len(self.groups) or self.groups[step.group] is None:
            return
        self.me = self.program.groups[step.group].index(self.rank)
        if step.kind in programs.MESSAGES:
            self.begin_messages(step)
            return
        possible, want = self.expected.of_collective(self.rank, step)
        outputs = []
        after = step.group in self.failed

        def check():
            return differs(step, possible, outputs, want)

        def call():
            work, got = self.collective(step, self.groups[step.group])
            outputs.extend(got)
            if work is not None:
                self.pending.append((step, after, work, check))
                return None
            return check()

        before = len(self.pending)
        self.noted(step.number, step.group, call)
        if len(self.pending) > before:
            self.events.pop()  # its end is noted when it is waited for

    def collective(self, s, group):
        """(the work, the outputs that count)"""
        size, me = len(self.program.groups[s.group]), self.me
        root = self.program.groups[s.group][s.root]
        how = {"group": group, "async_op": s.asynchronous}
        op = getattr(dist.ReduceOp, s.op.upper())
        own = programs.numbers(s, me)

        def empty(parts=1):
            return torch.full((s.count * parts,), 99, dtype=own.dtype)

        outs = [empty() for _ in range(size)]
        at_root = me == s.root
        if s.kind == "all_reduce":
            return dist.all_reduce(own, op, **how), [own]
        if s.kind == "broadcast":
            return dist.broadcast(own, root, **how), [own]
        if s.kind == "reduce":
            return dist.reduce(own, root, op, **how), [own] if at_root else []
        if s.kind == "all_gather":
            return dist.all_gather(outs, own, **how), outs
        if s.kind == "into_tensor":
            out = empty(size)
            return dist.all_gather_into_tensor(out, own, **how), [out]
        if s.kind == "gather":
            return dist.gather(own, outs if at_root else None, root, **how), outs if at_root else []
        many = programs.numbers(s, me, size)
        if s.kind == "scatter":
            parts = list(many.view(size, s.count).unbind()) if at_root else None
            return dist.scatter(outs[0], parts, root, **how), outs[:1]
        if s.kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(outs[0], many, op, **how), outs[:1]
        if s.kind == "all_to_all":
            out = empty(size)
            return dist.all_to_all_single(out, many, **how), [out]
        if s.kind == "all_to_all_v":
            given = [programs.part_of(s, me, m).clone() for m in range(size)]
            outs = [torch.full_like(programs.part_of(s, m, me), 99) for m in range(size)]
            return dist.all_to_all(outs, given, **how), outs
        return dist.barrier(**how), []

    def begin_messages(self, s):
        members, group = self.program.groups[s.group], self.groups[s.group]
        operations, checks = [], []
        for source, target in programs.transfers(s, self.me, len(members)):
            if source == self.me:
                operations.append(dist.P2POp(dist.isend, programs.numbers(s, source), members[target], group, s.tag))
                checks.append(lambda: None)
            else:
                out = torch.full((s.count,), 99, dtype=getattr(torch, s.dtype))
                possible, want = self.expected.of_receive(self.rank, s, source)
                operations.append(dist.P2POp(dist.irecv, out, members[source], group, s.tag))
                checks.append(lambda p=possible, o=out, w=want: differs(s, p, [o], w))
        if not operations:
            return
        after, works = s.group in self.failed, []

        def issue():
            if s.kind == "exchange":
                try:
                    works.extend(dist.batch_isend_irecv(operations))
                except Exception:
                    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)  # as in docs/torch.md
                    raise
            else:
                works.extend(o.op(o.tensor, o.peer, o.group, o.tag) for o in operations)

        if not self.noted(s.number, s.group, issue):
            return
        self.events.pop()

        def check():
            return next((text for text in (c() for c in checks) if text), None)

        ends = [(s, after, Works(works), check)]
        if s.asynchronous or s.kind == "send" and s.root == self.me:
            self.pending.extend(ends)
        else:
            self.wait_for(ends)


@dataclass
class Works:
    works: list

    def wait(self):
        for work in self.works:
            work.wait()


def differs(step, possible, got, want):
    """Why the call must not have succeeded so, or None."""
    if not possible:
        return "succeeded, although a rank that it needs made no such call"
    for tensor, value in zip(got, want, strict=True):
        if not torch.equal(tensor, value):
            at = int((tensor != value).nonzero()[0])
            return f"wrong result of {step}: {tensor[at].item()} at {at}, not {value[at].item()}"
    return None


def leftovers():
    """Returns the numbers of descriptors, threads, shared mappings and children of this process."""
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line for line in maps)
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        born = len(children.read().split())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": shared,
        "children": born,
    }


class Held:
    """The resources that a process holds between worlds: the most of its first ones."""

    def __init__(self):
        self.worlds, self.most = 0, {}

    def grown(self, patience=6.0):
        """Returns a text for each resource of which there are more now, for so many seconds: a destroyed group returns
        its memory a moment later."""
        self.worlds += 1
        until = time.monotonic() + patience
        while True:
            left = leftovers()
            if self.worlds <= WARM:
                self.most = {name: max(count, self.most.get(name, 0)) for name, count in left.items()}
                return []
            grown = [name for name in left if left[name] > self.most[name] + GROWTH[name]]
            if not grown or time.monotonic() > until:
                return [f"{left[n]} {n} in its world {self.worlds}, {self.most[n]} before" for n in grown]
            time.sleep(0.02)


def serve(connection, host, stacks, port):
    """The life of a rank's process: one world after the other."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if host:
        os.environ["NVX_HOST_ID"] = host
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import nvx  # noqa: F401

    with open(stacks, "w") as log:
        os.dup2(log.fileno(), 2)  # warnings of nvx are expected here
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        # Before the first world: torch looks up names to connect, which may take as long as a set-up may.
        server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        connection.send(True)
        held = Held()
        while True:
            try:
                program, rank, prefix = connection.recv()
            except EOFError:
                return
            run_program(connection, program, rank, dist.PrefixStore(prefix, server), held)


def leaves(program, rank):
    return any(f.rank == rank and f.kind == "leaves" for f in program.faults)


def run_program(connection, program, rank, store, held):
    runner = ProgramRunner(program, rank, connection.send)
    if runner.set_up(store):
        runner.run()
    connection.send(("ran", runner.events))
    if not leaves(program, rank):
        connection.recv()  # until all have run it: nobody leaves while another still calls
    runner.pending.clear()
    runner.groups.clear()
    if runner.set_up_well:
        runner.go_on()
    if dist.is_initialized():
        dist.destroy_process_group()
    connection.send(("done", held.grown(), runner.events))
