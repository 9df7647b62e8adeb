"""Ends a rank at a random moment. Measures when the other ranks raise, and which rank they name.

    python tests/torch/kills.py --worlds 300 --phase new_group --hosts 2

Every world is a handful of processes that make the default group ("init"), leave it and make it again ("again"), make
groups one after another ("new_group"), or all_reduces ("steady"). The ranks start up to `--spread` seconds apart. A
world is replayed by its seed, which its line begins with.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

ENDS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGTERM": signal.SIGTERM, "exit": None, "exec": None}
PHASES = ["init", "again", "new_group", "steady"]
GROUPS = 1000  # far more than a rank makes before its end
UNSEEN, SEEN = "ended before it joined", "ended later"  # bench/reliability.py reads these lines


@dataclass
class Plan:
    seed: int
    phase: str = "init"
    ranks: int = 4
    hosts: int = 1
    store: str = "tcp"  # torch's FileStore waits for ever for the rest of a record whose writer was killed
    how: str = "SIGKILL"
    spread: float = 0.1
    span: float = 0.06  # the end comes within this many seconds of the victim's start
    timeout: float = 5.0


@dataclass
class Outcome:
    plan: Plan
    victim: int
    moment: float  # of the end, in seconds after the victim's start
    seconds: float  # until the last of the others raised, from the end or from their own start
    named: bool  # in the first words of every error
    joined: bool  # false: a rank reports that the victim has not joined. In a later phase the others know it
    texts: list


def names(text, rank):
    """Whether the first words name the rank, alone or in "ranks 1, 3 have not joined"."""
    return re.search(rf"\branks? (\d+, )*{rank}\b", text.split(";")[0])


def end_itself(how, trigger):
    """For `how` that a signal cannot do: a thread, because the main one is in a call. It acts on the first byte."""

    def act():
        os.read(trigger, 1)
        if how == "exec":
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(20)"])
        os._exit(3)

    threading.Thread(target=act, daemon=True).start()


def store_of(plan, where):
    if plan.store == "file":
        return dist.FileStore(where, plan.ranks)
    port, prefix = where
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))


def be_rank(plan, rank, where, start, delay, trigger, pipe):
    if plan.hosts > 1:
        os.environ["NVX_HOST_ID"] = f"host{rank % plan.hosts}"
    torch.set_num_threads(1)
    store = store_of(plan, where)
    time.sleep(max(0.0, start - time.monotonic()))
    if trigger is not None:
        end_itself(plan.how, trigger)
    text, began = "nothing", time.monotonic()
    facts = {"rank": rank, "world_size": plan.ranks, "timeout": timedelta(seconds=plan.timeout)}
    try:
        dist.init_process_group("nvx", store=store, **facts)
        os.write(pipe, b"made\n")
        if plan.phase == "again":
            dist.destroy_process_group()
            time.sleep(delay)
            began = time.monotonic()
            dist.init_process_group("nvx", store=store, **facts)
        for _ in range(GROUPS if plan.phase == "new_group" else 0):
            dist.new_group()
        while True:
            dist.all_reduce(torch.ones(8))
    except Exception as error:
        text = str(error)
    os.write(pipe, json.dumps([began, time.monotonic(), text]).encode() + b"\n")
    os._exit(0)


def start_rank(*arguments):
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        try:
            be_rank(*arguments, ours)
        finally:
            os._exit(1)
    os.close(ours)
    return pid, os.fdopen(theirs)


def run_world(plan, folder, port=None):
    dice = random.Random(f"{plan.seed} {plan.phase} {plan.how}")
    victim = dice.randrange(plan.ranks)
    starts = [dice.random() * plan.spread for _ in range(plan.ranks)]
    moment = dice.random() * plan.span
    name = f"{plan.phase}-{plan.hosts}-{plan.how}-{plan.seed}-{time.monotonic_ns()}"
    where = os.path.join(folder, name) if plan.store == "file" else (port, name)
    began = time.monotonic() + 0.05 + 0.02 * plan.ranks
    end = began + starts[victim] + moment
    by_itself = ENDS[plan.how] is None
    trigger, trigger_end = os.pipe()
    ranks = []
    for rank in range(plan.ranks):
        acts = by_itself and rank == victim
        ranks.append(start_rank(plan, rank, where, began + starts[rank], starts[rank], trigger if acts else None))
    pid, lines = ranks[victim]
    if plan.phase != "init":
        for _, made in ranks if plan.phase == "steady" else [ranks[victim]]:
            assert made.readline() == "made\n"
        end = time.monotonic() + moment + (starts[victim] if plan.phase == "again" else 0)
    time.sleep(max(0.0, end - time.monotonic()))
    if by_itself:
        os.write(trigger_end, b"now")
    else:
        os.kill(pid, ENDS[plan.how])
    end = time.monotonic()
    others = [rank for rank in range(plan.ranks) if rank != victim]
    reports = [json.loads(ranks[rank][1].read().splitlines()[-1]) for rank in others]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for process, lines in ranks:
        os.waitpid(process, 0)
        lines.close()
    os.close(trigger)
    os.close(trigger_end)
    seconds = max(at - max(end, start) for start, at, _ in reports)
    texts = [text for _, _, text in reports]
    absent = any("has not joined" in text or "have not joined" in text for text in texts)
    return Outcome(
        plan,
        victim,
        moment,
        seconds,
        all(names(text, victim) for text in texts),
        plan.phase not in ("init", "again") or not absent,
        texts,
    )


@contextlib.contextmanager
def store_server(kind):
    """The port of a TCPStore in a process of its own, as a launcher serves it; None for a file."""
    if kind == "file":
        yield None
        return
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(ours, f"{server.port}\n".encode())
        signal.pause()
    try:
        with os.fdopen(theirs) as line:
            yield int(line.readline())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)


@contextlib.contextmanager
def busy(processes):
    """That many processes compute beside the worlds."""
    own, pids = os.getpid(), []
    for _ in range(processes):
        pids.append(os.fork())
        while pids[-1] == 0 and os.getppid() == own:
            sum(range(100_000))
        if pids[-1] == 0:
            os._exit(0)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_worlds(plans):
    """The outcomes, one after another. The plans have one kind of store."""
    import nvx  # noqa: F401, PLC0415  the children are forked with it

    folder = tempfile.mkdtemp(prefix="nvx-kills-")
    try:
        with store_server(plans[0].store) as port:
            for plan in plans:
                yield run_world(plan, folder, port)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(outcomes):
    seconds = sorted(o.seconds for o in outcomes) or [0.0]
    at = lambda part: seconds[min(len(seconds) - 1, int(part * len(seconds)))]  # noqa: E731
    named = sum(o.named for o in outcomes)
    return (
        f"{len(outcomes)} worlds: p50 {statistics.median(seconds):.3f} s, p99 {at(0.99):.3f} s, "
        f"max {seconds[-1]:.3f} s; the rank is named in {named}"
    )


def report(outcomes):
    parts = {name: [o for o in outcomes if o.joined == joined] for name, joined in ((UNSEEN, False), (SEEN, True))}
    return "\n".join(f"{name}: {summary(some)}" for name, some in parts.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument(
        "--limit", type=float, default=1.0, help="fail if a world that saw the rank took longer, or names it not"
    )
    for name, default in asdict(Plan(seed=1)).items():
        choices = {"phase": PHASES, "store": ["file", "tcp"], "how": list(ENDS)}.get(name)
        parser.add_argument(f"--{name}", type=type(default), default=default, choices=choices)
    given = vars(parser.parse_args())
    worlds, limit, seed, load = (given.pop(name) for name in ("worlds", "limit", "seed", "load"))
    outcomes, failed = [], 0
    with busy(load):
        for outcome in run_worlds([Plan(seed=seed + i, **given) for i in range(worlds)]):
            outcomes.append(outcome)
            if outcome.named and (outcome.seconds <= limit or not outcome.joined):
                continue
            failed += 1
            others = [t for t in outcome.texts if not names(t, outcome.victim)]
            where = f"rank {outcome.victim} after {outcome.moment:.4f} s"
            print(f"{outcome.plan.seed}: {where}: {outcome.seconds:.2f} s: {(others or outcome.texts)[0]}")
    print(report(outcomes))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
