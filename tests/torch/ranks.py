"""Ranks for tests: processes of one pool that stay alive between tests, or threads of one process.

    @on_ranks(2, 3)
    def test_sum(rank, world):          # the body; pytest sees test_sum[2] and test_sum[3]
        ...                             # runs in every rank, in a fresh default group over its own store

    @on_threads(2)
    def test_sum(pg, rank, world):      # the ranks are threads; pg is the bare backend over a HashStore
        ...

A rank that raises, dies or hangs fails the test with its rank, traceback and Python stacks. The ranks of a
failed test are killed by pid and replaced; those of a good one serve the next test, so every test also tests
re-initialisation.

NVX_TEST_BACKEND=gloo runs the same suite over gloo: a test that fails there too is wrong itself.
NVX_TEST_HOSTS=2 puts every second rank on another host, so that the suite also goes over the wire;
NVX_TEST_NETNS=a,b puts the ranks into these network namespaces by turns, which are hosts of their own.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any

import pytest
import torch
import torch.distributed as dist
from nvx.bench.hosts import enter as enter_namespace

BACKEND = os.environ.get("NVX_TEST_BACKEND", "nvx")
OVER_NVX = BACKEND == "nvx"
TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 60.0  # seconds a test may take before its ranks are killed
GRACE = 3.0  # seconds the other ranks get after the first of them failed
HOSTS = int(os.environ.get("NVX_TEST_HOSTS", "1"))
NAMESPACES = [name for name in os.environ.get("NVX_TEST_NETNS", "").split(",") if name]
PRELOAD = [
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.parallel",
]
PR_SET_PDEATHSIG = 1
PR_SET_THP_DISABLE = 41

SEVERAL_HOSTS = HOSTS > 1 or bool(NAMESPACES)
one_host = pytest.mark.skipif(
    SEVERAL_HOSTS, reason="between hosts every host rounds once: the bits are not those of rank order"
)
only_nvx = pytest.mark.skipif(not OVER_NVX, reason=f"{BACKEND} does not guarantee this")


@dataclass
class Job:
    """A request to one rank."""

    module: str
    name: str
    kwargs: dict
    rank: int
    world: int
    kind: str  # "group": in a default group; "bare": no group; "threads": all ranks are threads of one process
    backend: str
    store: str
    where: object
    op_timeout: float


@dataclass
class Member:
    """One process of the pool, seen from the test."""

    process: multiprocessing.Process
    conn: object
    stacks: str
    host: str
    ready: bool = False  # it has imported nvx and loaded what its pool prepares

    def kill(self):
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        self.conn.close()


@dataclass
class Outcome:
    ok: bool
    value: object = None
    text: str = ""
    died: bool = False


# --- inside a rank ------------------------------------------------------------------------------------------


def register_backend():
    """Registers the backend: `import torch` does so only for an installed package, not for one on PYTHONPATH."""
    if OVER_NVX:
        importlib.import_module("nvx")


def make_backend(store, rank, world, op_timeout=30.0):
    """The bare c10d backend, without torch.distributed's Python layer."""
    timeout = timedelta(seconds=op_timeout)
    if not OVER_NVX:
        return dist.ProcessGroupGloo(store, rank, world, timeout)
    c = importlib.import_module("nvx._C")
    return c.ProcessGroupNVX(store, rank, world, c.ProcessGroupNVX.Options(timeout=timeout))


def open_store(job):
    if job.store == "tcp":
        port, prefix = job.where
        server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, server)
    store = dist.FileStore(job.where, job.world)
    return dist.PrefixStore("deep", dist.PrefixStore("er", store)) if job.store == "prefix" else store


def sync(name):
    """For bodies: waits until every rank has reached this point, over the store and not over a group under test."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    end = time.monotonic() + 20
    while store.add(name, 0) < dist.get_world_size():
        assert time.monotonic() < end, f"not every rank came to {name!r}"
        time.sleep(0.005)


def eventually(holds, seconds=10.0):
    """For bodies: polls until `holds()` is true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.001)


def argument_error(text):
    import nvx

    return pytest.raises(nvx.ArgumentError, match=text)


def until_it_fails(call, seconds=20.0):
    """For bodies: repeats the call until it raises. A failure on the device is raised by a later call."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        time.sleep(0.01)


@contextlib.contextmanager
def stderr_lines():
    """The lines that this process writes to stderr inside the block; complete after the block."""
    lines, before = [], os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().splitlines()


def body_of(job):
    thing = getattr(importlib.import_module(job.module), job.name)
    return getattr(thing, "body", thing)


def call(body, **offered):
    """Calls `body` with those of the offered arguments that it names."""
    wanted = inspect.signature(body).parameters
    return body(**{name: value for name, value in offered.items() if name in wanted})


def run_in_group(job):
    body = body_of(job)  # before there is a group, which a module of torch would keep as a default argument
    if job.kind == "group":
        dist.init_process_group(
            job.backend,
            store=open_store(job),
            rank=job.rank,
            world_size=job.world,
            timeout=timedelta(seconds=job.op_timeout),
        )
    offered = {"store": job.store, **job.kwargs}
    value = call(body, rank=job.rank, world=job.world, **offered)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def run_in_threads(job):
    store = dist.HashStore()
    body = body_of(job)
    values, failures = [None] * job.world, []
    failed = threading.Event()

    def rank_thread(rank):
        try:
            pg = make_backend(dist.PrefixStore("group", store), rank, job.world, job.op_timeout)
            values[rank] = call(body, pg=pg, rank=rank, world=job.world, store=store, **job.kwargs)
            pg.shutdown()
        except BaseException:
            failures.append(f"thread of rank {rank}:\n{traceback.format_exc()}")
            failed.set()

    threads = [threading.Thread(target=rank_thread, args=(r,), daemon=True) for r in range(job.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failed.is_set():
            thread.join(0.05)
    if failures:
        end = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        raise AssertionError("\n".join(failures))
    return values


def attempt(job):
    lost = []  # what threads raise

    def note(hook):
        threading.__excepthook__(hook)
        if hook.exc_type is not SystemExit:
            lost.extend(traceback.format_exception(hook.exc_type, hook.exc_value, hook.exc_traceback))

    threading.excepthook = note
    try:
        torch.manual_seed(0)
        value = run_in_threads(job) if job.kind == "threads" else run_in_group(job)
    except BaseException:
        return Outcome(False, text=traceback.format_exc())
    return Outcome(not lost, value, "in a thread of the body:\n" + "".join(lost) if lost else "")


def renew_fake_device(job):
    """Resets the device's speed before each test."""
    importlib.import_module("fake_device").renew()


def serve(conn, paths, stacks, host, prepare):
    """The main loop of a rank process: receives jobs and returns outcomes until the test run ends or dies."""
    if host in NAMESPACES:
        enter_namespace(host)
    elif host:
        os.environ["NVX_HOST_ID"] = host
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # On a busy machine khugepaged is preempted while it holds a rank's mmap_lock. The rank then waits in brk() until
    # its peers time out.
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    gc.freeze()  # no collection looks at what the modules imported before this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    with open(stacks, "w") as log:
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        register_backend()
        before = None
        if prepare:
            readied = importlib.import_module(prepare)
            readied.load()
            before = getattr(readied, "before", renew_fake_device)
        conn.send(True)
        while True:
            try:
                job = conn.recv()
            except EOFError:
                return
            if before:
                before(job)
            outcome = attempt(job)
            try:
                conn.send(outcome)
            except Exception:
                conn.send(Outcome(False, text=f"the body's result cannot be sent:\n{traceback.format_exc()}"))


# --- inside the test run ------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """The pool. A test of n ranks uses n of its processes. `prepare`: a module that each process loads first; its
    `before(job)` runs before each test. `hosts`: the number of hosts, assigned to ranks round robin."""

    prepare: str = ""
    hosts: int = HOSTS
    members: list = field(default_factory=list)
    history: list = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)
    server: object = None

    def __post_init__(self):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.folder = tempfile.mkdtemp(prefix="nvx-ranks-")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def close(self):
        for member in self.members:
            member.conn.close()
        for member in self.members:
            member.process.join(5)
            if member.process.is_alive():
                os.kill(member.process.pid, signal.SIGKILL)
        self.members.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        body,
        *,
        world=2,
        kind="group",
        store="file",
        backend=BACKEND,
        op_timeout=30.0,
        limit=LIMIT,
        dies=(),
        fresh=False,
        **kwargs,
    ):
        """Runs a module-level body in every rank and returns the ranks' results. The ranks in `dies` must die. `fresh`:
        in new processes, because groups with graphs keep their GPU memory until their process ends."""
        if fresh:
            self._replace(list(self.members))
        name = getattr(body, "__name__", body)
        where = self._new_store(store)
        count = 1 if kind == "threads" else world
        members = self._members(count)
        label = f"{body.__module__}.{name}[{world}]"
        for rank, member in enumerate(members):
            job = Job(body.__module__, name, kwargs, rank, world, kind, backend, store, where, op_timeout)
            with contextlib.suppress(BrokenPipeError):  # it died as it began, and its outcome says so
                member.conn.send(job)
        try:
            outcomes = self._collect(members, limit, dies)
        except BaseException:
            self._replace(members)
            raise
        failed = {r: o for r, o in outcomes.items() if not (o.died if r in dies else o.ok)}
        self._replace([m for r, m in enumerate(members) if failed or r in dies])
        if failed:
            text = "\n".join(
                f"--- rank {r} of {world}: {o.text or 'should have died'}" for r, o in sorted(failed.items())
            )
            before = ", ".join(self.history[-5:]) or "nothing"
            self.history.clear()
            pytest.fail(f"{label}\n{text}\n(these ranks had run before: {before})", pytrace=False)
        self.history.append(label)
        values = [outcomes[r].value for r in range(count)]
        return values[0] if kind == "threads" else values

    def _new_store(self, store):
        number = next(self.numbers)
        if store != "tcp":
            return os.path.join(self.folder, f"store-{number}")
        if self.server is None:
            self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.server.port, f"run-{number}"

    def _members(self, count):
        """One process for each rank; hosts are assigned round robin. All have begun, so that the timeouts of a test
        do not include that."""
        self._replace([m for m in self.members if not m.process.is_alive()])
        hosts = NAMESPACES or ([f"host{h}" for h in range(self.hosts)] if self.hosts > 1 else [""])
        chosen = []
        for rank in range(count):
            host = hosts[rank % len(hosts)]
            known = (m for m in self.members if m.host == host and m not in chosen)
            chosen.append(next(known, None) or self._start(host))
        for member in chosen:
            with contextlib.suppress(EOFError, OSError):
                member.ready = member.ready or (member.conn.poll(LIMIT) and member.conn.recv())
        return chosen

    def _start(self, host):
        ours, theirs = self.context.Pipe()
        stacks = os.path.join(self.folder, f"stacks-{next(self.numbers)}")
        process = self.context.Process(target=serve, args=(theirs, [HERE, *sys.path], stacks, host, self.prepare))
        process.start()
        theirs.close()
        self.members.append(Member(process, ours, stacks, host))
        return self.members[-1]

    def _replace(self, broken):
        for member in broken:
            member.kill()
        self.members = [m for m in self.members if m not in broken]

    def _collect(self, members, limit, dies):
        """Waits for every rank until the limit, or for `GRACE` after the first failure."""
        outcomes = {}
        end = time.monotonic() + limit
        while len(outcomes) < len(members):
            waiting = {r: m for r, m in enumerate(members) if r not in outcomes}
            sources = [m.conn for m in waiting.values()] + [m.process.sentinel for m in waiting.values()]
            ready = wait_for_any(sources, max(0.0, end - time.monotonic()))
            if not ready:
                return outcomes | {r: self._hung(m, limit) for r, m in waiting.items()}
            for rank, member in waiting.items():
                if member.conn in ready or member.process.sentinel in ready:
                    outcomes[rank] = self._receive(member)
                    if not outcomes[rank].ok and rank not in dies:
                        end = min(end, time.monotonic() + GRACE)
        return outcomes

    def _receive(self, member):
        try:
            if member.conn.poll():
                return member.conn.recv()
        except (EOFError, OSError):
            pass
        member.process.join(5)
        return Outcome(False, text=f"died, exit code {member.process.exitcode}", died=True)

    def _hung(self, member, limit):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with open(member.stacks) as log:
            return Outcome(False, text=f"hung, killed (limit {limit} s, or a peer failed first)\n{log.read()}")


# --- decorators that set where a test runs ------------------------------------------------------------------


def _as_test(body, worlds, run, pool="ranks"):
    """A pytest function that runs the body in the pool, with the pool, the world and the body's own parameters."""
    own = [p for p in inspect.signature(body).parameters if p not in ("rank", "world", "pg", "store")]

    def test(**given):
        run(given.pop(pool), test, **given)

    names = [pool, "world", *own]
    if "store" in inspect.signature(body).parameters:
        names.append("store")
    test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
    test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
    test.__qualname__ = body.__qualname__
    test.body = body
    return pytest.mark.parametrize("world", worlds)(test)


def on_ranks(*worlds, pool="ranks", **settings):
    """Runs the decorated body in every rank of a pool of processes, once for each world size."""
    return lambda body: _as_test(body, worlds, lambda ranks, test, **given: ranks.run(test, **settings, **given), pool)


def on_two_hosts(*worlds, **settings):
    """Like `on_ranks`, always over two hosts."""

    def run(ranks, test, **given):
        ranks.run(test, **settings, **given)

    return lambda body: _as_test(body, worlds, run, pool="ranks_of_two_hosts")


def on_fake_gpus(*worlds, pool="fake_gpus", **settings):
    """Like `on_ranks`, in processes whose accelerator is `fake_device`; the default group serves it and the CPU."""
    settings.setdefault("backend", f"cpu:{BACKEND},fakegpu:{BACKEND}")

    def run(ranks, test, **given):
        ranks.run(test, **settings, **given)

    return lambda body: _as_test(body, worlds, run, pool)


def on_simulated_gpus(*worlds, **settings):
    """Like `on_fake_gpus`, with nvx's kernels simulated on the accelerator."""
    return on_fake_gpus(*worlds, pool="simulated_gpus", **settings)


def on_proxied_gpus(*worlds, **settings):
    """Like `on_simulated_gpus`, over two hosts: kernels serve the ranks of each host."""
    return on_fake_gpus(*worlds, pool="proxied_gpus", **settings)


def on_domain_gpus(*worlds, **settings):
    """Like `on_proxied_gpus`, in one NVLink domain."""
    return on_fake_gpus(*worlds, pool="domain_gpus", **settings)


def on_direct_gpus(*worlds, **settings):
    """Like `on_proxied_gpus`, over a UCX that moves device memory."""
    return on_fake_gpus(*worlds, pool="direct_gpus", **settings)


def on_gpus(*worlds, pool="gpus", **settings):
    """Like `on_ranks`, on GPUs; the default group serves them and the CPU. A body returns its figures, or why it
    left out a part: then the test is skipped. A request that nvx refused fails the test."""
    settings.setdefault("backend", f"cpu:{BACKEND},cuda:{BACKEND}")

    def run(ranks, test, **given):
        lines = ranks.run(test, **settings, **given)[0] or []
        for line in lines:
            assert not line.get("refused"), line
            if "left_out_part" in line:
                pytest.skip(f"{line['left_out_part']}: {line['why']}")

    return lambda body: pytest.mark.gpu(_as_test(body, worlds, run, pool))


def on_threads(*worlds, **settings):
    """Runs the decorated body with ranks that are threads of one process, once for each world size."""
    return lambda body: _as_test(
        body, worlds, lambda ranks, test, **given: ranks.run(test, kind="threads", **settings, **given)
    )


def on_simulated_threads(*worlds, **settings):
    """Like `on_threads`, in a process whose accelerator has nvx's kernels simulated on it: the ranks share it."""

    def run(ranks, test, **given):
        ranks.run(test, kind="threads", **settings, **given)

    return lambda body: _as_test(body, worlds, run, pool="simulated_gpus")
