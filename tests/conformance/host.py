"""The process of one pass: imports the tests once, forks the ranks, and gives them one test at a time.

A rank that hangs or dies is replaced together with the other ranks, by a fork without another import."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path

from nvx.bench.hosts import enter as enter_namespace

from tests.conformance import skips
from tests.conformance.passes import Pass
from tests.conformance.place import Place
from tests.conformance.rank import ABSENT, FAILED, NO_TEST, SKIPPED, Verdict, serve

IMPORTS = 60.0  # additional seconds for ranks that import the tests themselves
GRACE = 5.0  # seconds that the other ranks have to report after one has failed


@dataclass
class Spec:
    """The task of a host. `folder` is its own empty folder."""

    one: Pass
    backend: str
    world_size: int
    timeout: float
    folder: str
    logs: str
    selected: object  # str -> bool
    done: set = field(default_factory=set)  # tests that earlier passes ran
    imports: tuple = ()
    fresh: bool = False
    file: str = ""  # tests to run in place of torch's DistributedTest
    place: Place = Place()  # of tensors for which tests request CUDA; if it is not the CPU, only those tests run
    module: str = ""  # path of an nvx module to load in place of the installed one
    end: float = float("inf")  # by time.monotonic(): tests that have not begun by then do not run
    served: bool = False  # nvx serves the name that the tests use


@dataclass
class Result:
    test: str
    one: str
    outcome: str
    seconds: float = 0.0
    text: str = ""
    groups: int = 0  # that nvx served by another name, on rank 0


class Ranks:
    """The live ranks of one host. `start` forks them, `stop` ends exactly these. If the imports may have initialized
    a device, a fork could not use it, so each rank is then a process that imports the tests itself."""

    def __init__(self, suite, spec: Spec):
        self.suite, self.logs = suite, spec.logs
        self.anew = replace(spec, selected=None) if spec.place.kind != "cpu" else None
        self.members: list[tuple] = []  # (process, pipe)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn" if self.anew else "fork")
        for rank in range(self.suite.world_size):
            ours, theirs = context.Pipe()
            others = [ours, *(p for _, p in self.members)]
            if self.anew:
                process = context.Process(target=_fresh, args=(self.anew, rank, theirs, self.log(rank)))
            else:
                process = context.Process(target=self._child, args=(rank, theirs, others))
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def _child(self, rank: int, pipe, others) -> None:
        for other in others:  # otherwise a rank would keep the host's pipe ends open and never see them close
            other.close()
        spread(rank)
        serve(self.suite, rank, pipe, self.log(rank))

    def log(self, rank: int) -> str:
        return f"{self.logs}/rank{rank}.log"

    def stop(self) -> None:
        for process, _ in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process, pipe in self.members:
            process.join()
            pipe.close()
        self.members = []

    def run(self, test: str, folder: str, timeout: float) -> list[Verdict]:
        """One verdict a rank. After a verdict that is FAILED, these ranks must not be used again."""
        if not self.members:
            self.start()
            timeout += IMPORTS if self.anew else 0
        for _, pipe in self.members:
            pipe.send((test, folder))
        verdicts: dict[int, Verdict] = {}
        deadline = time.monotonic() + timeout
        while len(verdicts) < len(self.members):
            waiting = {p: r for r, (_, p) in enumerate(self.members) if r not in verdicts}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._trace(waiting.values(), verdicts, timeout)
                break
            for pipe in ready:
                verdicts[waiting[pipe]] = self._hear(waiting[pipe], pipe)
            if any(v.outcome == FAILED for v in verdicts.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return [verdicts[rank] for rank in range(len(self.members))]

    def _hear(self, rank: int, pipe) -> Verdict:
        try:
            return pipe.recv()
        except EOFError:
            process = self.members[rank][0]
            process.join(5)
            code = process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return Verdict(FAILED, f"the process ended: {how}\n{self.tail(rank)}")

    def _trace(self, missing, verdicts: dict, timeout: float) -> None:
        """Makes the ranks that did not report write their stacks, and uses that as their verdict."""
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.members[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        answer = any(v.outcome == FAILED for v in verdicts.values())
        why = "still busy when another rank failed" if answer else f"no answer in {timeout:.0f} s"
        for rank in missing:
            verdicts[rank] = Verdict(FAILED, f"{why}\n{self.tail(rank)}")

    def tail(self, rank: int, lines: int = 60) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(Path(self.log(rank)).read_text(errors="replace").splitlines()[-lines:])
        return ""


def _fresh(spec: Spec, rank: int, pipe, log: str) -> None:
    suite = load(spec)
    gc.freeze()  # as in the host
    serve(suite, rank, pipe, log)


def spread(rank: int) -> None:
    """With NVX_TEST_NETNS=a,b the ranks enter these network namespaces in turn. With NVX_TEST_HOSTS=2 they only
    claim to be on two hosts."""
    names = [name for name in os.environ.get("NVX_TEST_NETNS", "").split(",") if name]
    count = int(os.environ.get("NVX_TEST_HOSTS", "1"))
    if names:
        enter_namespace(names[rank % len(names)])
    elif count > 1:
        os.environ["NVX_HOST_ID"] = f"host{rank % count}"


def load(spec: Spec):
    if spec.file:
        from tests.conformance.files import FileSuite

        return FileSuite(spec)
    from tests.conformance.distributed import DistributedSuite

    return DistributedSuite(spec)


def host(spec: Spec, report) -> None:
    """Runs the pass; `report` gets the count first, then every Result."""
    suite = load(spec)
    names = [n for n in suite.names() if spec.selected(n) and n not in spec.done and spec.one.admits(n)]
    if spec.place.kind != "cpu":
        names = [n for n in names if suite.needs_gpu(n)]
    gc.collect()
    gc.freeze()  # imported objects stay, so a rank's garbage collector need not visit them
    ranks = Ranks(suite, spec)
    try:
        hello = _run(ranks, NO_TEST, spec)
        if hello.outcome == FAILED:
            raise RuntimeError(f"no group can be made over {spec.backend}:\n{hello.text}")
        report(len(names))
        for name in names:
            why = _not_run(suite, spec, name)
            report(Result(name, spec.one.name, SKIPPED, 0.0, why) if why else _run(ranks, name, spec))
    finally:
        ranks.stop()


def _not_run(suite, spec: Spec, name: str) -> str | None:
    why = skips.reason("served" if spec.served else spec.one.name, name, spec.backend) or spec.one.needs_more(
        name, spec.place
    )
    late = "time ran out" if time.monotonic() > spec.end else None
    return why or suite.why_not(name) or late


def _run(ranks: Ranks, name: str, spec: Spec) -> Result:
    if spec.fresh or name in skips.NEEDS_NEW_RANKS:
        ranks.stop()
    folder = tempfile.mkdtemp(dir=spec.folder)
    for inner in ("barrier", "test_dir"):
        os.mkdir(f"{folder}/{inner}")
    begin = time.monotonic()
    verdicts = ranks.run(name, folder, spec.timeout)
    seconds = time.monotonic() - begin
    outcome, text = _judge(verdicts)
    if outcome == FAILED:
        ranks.stop()
    shutil.rmtree(folder, ignore_errors=True)
    return Result(name, spec.one.name, outcome, seconds, text, verdicts[0].groups)


def _judge(verdicts: list[Verdict]) -> tuple[str, str]:
    """A test passes if all ranks pass it, and is skipped if all ranks skip it."""
    verdicts = [v for v in verdicts if v.outcome != ABSENT]
    count = Counter(v.outcome for v in verdicts)
    if len(count) == 1 and FAILED not in count:
        return verdicts[0].outcome, verdicts[0].text
    if FAILED not in count:
        answer = "; ".join(f"rank {r} {v.outcome} {v.text}" for r, v in enumerate(verdicts))
        return FAILED, f"the ranks disagree: {answer}"
    return FAILED, _merge(verdicts)


def _merge(verdicts: list[Verdict]) -> str:
    """The ranks' reports; equal ones are merged."""
    who = defaultdict(list)
    for rank, verdict in enumerate(verdicts):
        answer = verdict.text.rstrip() if verdict.outcome == FAILED else verdict.outcome
        who[answer].append(str(rank))
    return "\n".join(f"--- rank {', '.join(ranks)}\n{answer}" for answer, ranks in who.items())
