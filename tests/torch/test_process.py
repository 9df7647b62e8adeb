"""The process around the ranks: exit, children, interrupts, leaks."""

import atexit
import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import warm
from nvx.commands import drill
from ranks import BACKEND, on_ranks, only_nvx, sync
from torch.utils.data import DataLoader, TensorDataset

# --- exit ---------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, threading, time
import torch, torch.distributed as dist
if {backend!r} == "nvx":
    import nvx
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group({backend!r}, store=dist.FileStore(store, 2), rank=rank, world_size=2)
total = torch.ones(70_001)
dist.all_reduce(total)
assert total.unique().tolist() == [2.0]
{body}
print("end", time.monotonic(), flush=True)
"""


def start(folder, body, **environment):
    return start_program(folder, PROGRAM.format(backend=BACKEND, body=body), **environment)


def start_program(folder, code, world=2, *arguments, **environment):
    store = os.path.join(folder, f"store-{time.monotonic_ns()}")
    return [
        warm.Popen(
            ["-c", code, store, str(rank), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(world)
    ]


def finish(processes, limit=60):
    """Returns (exit code, stdout, stderr) of each process, after all have ended."""
    try:
        return [(p.communicate(timeout=limit), p.returncode, time.monotonic()) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                os.kill(p.pid, signal.SIGKILL)
                p.wait()


def seconds_after_end(out, ended):
    return ended - float(out.split("end ")[1].split()[0])


@pytest.fixture
def exit_limit(tmp_path):
    """Two seconds more than a rank that has destroyed its group needs to exit at the current load."""
    plain = finish(start(tmp_path, "dist.destroy_process_group()"))
    return 2.0 + max(seconds_after_end(out, ended) for (out, _), _, ended in plain)


@only_nvx
def test_exit_without_destroy(tmp_path, exit_limit, record_property):
    """With a second group, an asynchronous operation without a wait, and a tensor in its callback."""
    body = """
group = dist.new_group()
works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(5)]
works[0].get_future().then(lambda f: f.value())
dist.barrier()
"""
    for (out, err), code, ended in finish(start(tmp_path, body)):
        assert code == 0, err
        assert seconds_after_end(out, ended) < exit_limit
        assert err.strip() == "", err
        record_property("max_exit_s", seconds_after_end(out, ended))


def test_handlers_registered_before_the_group_may_wait(tmp_path):
    """nvx ends what is in flight only after them."""
    program = PROGRAM.replace("store, rank =", "import atexit\natexit.register(lambda: ending())\nstore, rank =")
    body = """
work = []
def ending():
    work[0].wait()
    print("waited", flush=True)
    dist.destroy_process_group()
time.sleep(rank)
work.append(dist.all_reduce(torch.ones(2), async_op=True))
"""
    for (out, err), code, _ in finish(start_program(tmp_path, program.format(backend=BACKEND, body=body))):
        assert (code, err.strip()) == (0, "") and "waited" in out


@only_nvx
def test_a_daemon_thread_in_a_synchronous_call_does_not_end_the_process(tmp_path):
    body = """
call = lambda: print("called", flush=True) or dist.all_reduce(torch.ones(2)) or print("returned", flush=True)
if rank == 0:
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.3 + rank)
"""
    (out, err), code, _ = finish(start(tmp_path, body))[0]  # with no, a part of or the whole traceback in `err`
    assert code == 0 and "called" in out and "returned" not in out, err


@pytest.mark.parametrize("on_error", ["raise", "abort"])
def test_exit_code_with_a_receive_that_never_comes(tmp_path, exit_limit, on_error):
    body = """
work = dist.irecv(torch.ones(3), 1 - rank)
print("end", time.monotonic(), flush=True)
sys.exit(7)
"""
    for (out, err), code, ended in finish(start(tmp_path, body, NVX_ON_ERROR=on_error)):
        assert code == 7, err
        assert seconds_after_end(out, ended) < exit_limit
        assert err.strip() == "", err


@only_nvx
def test_an_exception_in_one_rank(tmp_path):
    body = """
if rank == 1:
    raise KeyError("the reason")
started = time.monotonic()
try:
    dist.all_reduce(torch.ones(3))
finally:
    print("waited", time.monotonic() - started, flush=True)
"""
    results = finish(start(tmp_path, body))
    (out, err), code, _ = results[0]
    assert code == 1
    assert "nvx: " in err and "rank 1" in err, err
    (out, err), code, _ = results[1]
    assert code == 1
    assert "KeyError: 'the reason'" in err
    assert "nvx" not in err.split("KeyError")[-1], err


@only_nvx
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("phase", ["init", "again", "new_group"])
def test_a_rank_that_is_killed_in_set_up(phase, hosts):
    """At random moments. `python tests/torch/kills.py --help`: hundreds of them, and other ways to end."""
    code = "import kills; kills.main()"
    settings = ["--worlds", "4", "--phase", phase, "--hosts", str(hosts), "--limit", str(hosts)]
    settings += ["--timeout", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = warm.run(["-c", code, *settings], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


DESCRIPTORS = """
import os, resource, sys
from datetime import timedelta
import torch.distributed as dist, nvx._C
for spare in range(1, 8):
    if os.fork() == 0:
        store, held = dist.FileStore(f"{sys.argv[1]}-{spare}", 2), []
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for number in held[-spare:]:
                os.close(number)
        try:
            dist.init_process_group("nvx", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.3))
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@only_nvx
def test_a_store_without_a_descriptor(tmp_path):
    """A FileStore opens its file for each call. Each process may open one file more than the one before."""
    done = warm.run(["-c", DESCRIPTORS, str(tmp_path / "store")], capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stdout.splitlines() if "Too many open files" in line]
    of_store = r"nvx: process \d+ cannot use the store, .*: Too many open files. Next: raise .* \(ulimit -n\)"
    assert any(re.match(of_store, error) for error in errors), done.stdout + done.stderr
    assert all("ulimit -n" in error for error in errors if error.startswith("nvx: ")), done.stdout


@only_nvx
def test_interrupt(tmp_path, exit_limit):
    """Ctrl-C in a rank that waits for a peer."""
    body = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
if rank == 1:
    time.sleep(3)
    os._exit(0)
print("waiting", flush=True)
dist.all_reduce(torch.ones(3))
"""
    processes = start(tmp_path, body)
    assert processes[0].stdout.readline() == "waiting\n"
    time.sleep(0.3)
    processes[0].send_signal(signal.SIGINT)
    started = time.monotonic()
    (_, err), code, ended = finish(processes)[0]
    assert "KeyboardInterrupt" in err, err
    assert code in (130, -signal.SIGINT)
    assert ended - started < exit_limit


@only_nvx
def test_on_error_abort(tmp_path):
    """`NVX_ON_ERROR=abort`: a failure ends the process, for jobs that an external supervisor restarts."""
    body = """
if rank == 1:
    os._exit(5)
dist.all_reduce(torch.ones(3))
print("must not get here")
"""
    (out, err), code, _ = finish(start(tmp_path, body, NVX_ON_ERROR="abort"))[0]
    assert code == -signal.SIGABRT, (code, err)
    last = next(line for line in err.splitlines() if line.endswith("(NVX_ON_ERROR=abort)"))
    assert re.fullmatch(r"nvx\[\d+\] rank 1 \(pid \d+, host \S+\) has ended.*", last), err
    assert "Next: see the log of rank 1" in last, err
    assert "must not get here" not in out


@only_nvx
def test_on_error_abort_spares_operations_that_this_rank_aborted(tmp_path):
    """Leaving a group with operations in flight, or aborting it, is no failure of the process."""
    body = """
group = dist.new_group()
if rank == 0:
    works = [dist.all_reduce(torch.ones(70_001), group=group, async_op=True) for _ in range(2)]
    works.append(dist.irecv(torch.ones(70_001), 1, group=group))
    time.sleep(0.1)
    dist.destroy_process_group(group)
    for work in works:
        try:
            work.wait()
        except dist.DistBackendError as error:
            print("raised", flush=True)
dist.barrier()
group = dist.new_group()
if rank == 0:
    works = [dist.all_reduce(torch.ones(70_001), group=group, async_op=True), dist.irecv(torch.ones(3), 1, group=group)]
    time.sleep(0.1)
    group._get_backend(torch.device("cpu")).abort()
    for work in works:
        try:
            work.wait()
        except dist.DistBackendError as error:
            print("raised", flush=True)
dist.barrier()
dist.irecv(torch.ones(3), 1 - rank)
dist.destroy_process_group()
sys.exit(7)
"""
    for rank, ((out, err), code, _) in enumerate(finish(start(tmp_path, body, NVX_ON_ERROR="abort"))):
        assert code == 7, (code, err)
        assert out.count("raised") == (5 if rank == 0 else 0), out


@only_nvx
@pytest.mark.parametrize("waits", [False, True])
def test_on_error_abort_and_a_peer_that_has_left(tmp_path, waits):
    """It is a failure of the process only if the process waits for that peer."""
    body = f"""
group = dist.new_group()
if rank == 0:
    work = dist.irecv(torch.ones(3), 1, group=group)
else:
    dist.destroy_process_group(group)
time.sleep(1.5)
if rank == 0 and {waits}:
    work.wait()
sys.exit(7)
"""
    codes = [code for _, code, _ in finish(start(tmp_path, body, NVX_ON_ERROR="abort"))]
    assert codes == [-signal.SIGABRT if waits else 7, 7]


# --- worlds of several sizes over one store --------------------------------------------------------------------

WORLDS = """
import sys, time
import torch, torch.distributed as dist
import nvx
port, rank, sizes = int(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3].split(",")]
served = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
for size in sizes:
    if rank < size:
        dist.init_process_group("nvx", store=dist.PrefixStore("job", served), rank=rank, world_size=size)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [float(size)] * 3
        dist.destroy_process_group()
print("end", flush=True)
"""


@only_nvx
@pytest.mark.parametrize("sizes", ["2,3", "3,2,3"])
def test_a_world_that_grows_over_one_store(sizes):
    """A new rank has been in fewer worlds than the others, and comes before they begin the world that it joins."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = ["-c", WORLDS, str(store.port)]
    ranks = [
        warm.Popen([*command, str(rank), sizes], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    for (out, err), code, _ in finish(ranks, limit=50):
        assert code == 0 and out == "end\n", err


# --- fork ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_data_loader_with_workers(rank, world):
    data = TensorDataset(torch.arange(64.0).view(16, 4))
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            total = x.clone()
            dist.all_reduce(total)
            assert torch.equal(total, x * 2)
            work = dist.all_reduce(total, async_op=True)
            work.wait()
            assert torch.equal(total, x * 4)


def in_child(call):
    """Runs `call` in a forked child and returns the child's exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@only_nvx
@on_ranks(2)
def test_a_child_that_exits_leaves_the_group_alone(rank, world):
    """The child runs its exit handlers and destroys its copy of the group: this must not affect the parent's group."""

    def leave():
        atexit._run_exitfuncs()
        return 0

    def destroy():
        dist.destroy_process_group()
        return 0

    work = dist.all_reduce(torch.ones(70_001), async_op=True)
    for call in (leave, destroy):
        assert in_child(call) == 0
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total.unique().tolist() == [2.0]
    work.wait()


@only_nvx
@on_ranks(2)
def test_a_child_that_uses_its_parents_group_gets_an_error(rank, world):
    """A forked child that uses the group gets an immediate error; the parent's group still works."""

    def use():
        try:
            dist.all_reduce(torch.ones(3))
        except (RuntimeError, ValueError) as error:
            return 0 if "fork" in str(error) else 1
        return 2

    started = time.monotonic()
    assert in_child(use) == 0
    assert time.monotonic() - started < 2.0
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total.unique().tolist() == [2.0]


@only_nvx
@on_ranks(2)
def test_nothing_of_a_group_is_touched_in_a_child(rank, world):
    """Every call raises, with operations of all kinds in flight at the fork; destroying and dropping is silent."""
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    tensor, sparse = torch.ones(3), torch.eye(3).to_sparse()
    options = dist.BarrierOptions()
    if rank == 0:
        work, message = dist.all_reduce(torch.ones(3), group=group, async_op=True), dist.irecv(torch.ones(3), 1, group)
        calls = [
            lambda: backend.allreduce([tensor]),
            lambda: backend.allreduce([sparse]),
            lambda: backend.barrier(options),
            lambda: backend.send([tensor], 1, 0),
            lambda: backend.recv([tensor], 1, 0),
            lambda: backend.recv_anysource([tensor], 0),
            lambda: group.monitored_barrier(timedelta(seconds=1)),
            lambda: group._start_coalescing(torch.device("cpu")),
            lambda: backend._get_sequence_number_for_group(),
            lambda: backend.set_timeout(timedelta(seconds=1)),
            lambda: backend.options,
            lambda: backend.get_error(),
            lambda: group._wait_for_pending_works(),
            lambda: work.wait(),
            lambda: work.wait(timedelta(seconds=5)),
            lambda: work.get_future(),
            lambda: message.wait(),
            lambda: message.wait(timedelta(seconds=5)),
        ]

        def use():
            quiet = 0
            for number, call in enumerate(calls):
                try:
                    call()
                    quiet = quiet or 10 + number
                except (RuntimeError, ValueError) as error:
                    quiet = quiet or (0 if "fork" in str(error) else 50 + number)
            backend.abort()
            backend.shutdown()
            return quiet

        started = time.monotonic()
        code = in_child(use)
        assert code == 0, f"call {code - 10 if code < 50 else code - 50}"
        assert time.monotonic() - started < 5.0
    sync("child has gone")
    if rank == 1:
        dist.all_reduce(torch.ones(3), group=group)
        dist.send(torch.ones(3), 0, group)
    else:
        work.wait()
        message.wait()


# --- leaks --------------------------------------------------------------------------------------------------


def shared_names():
    """The names in /dev/shm, without those of other tests that run beside: of nvx bench, and of torch's DataLoader."""
    return {name for name in drill.shared_names() if not name.startswith(("nvx-bench-", "torch_"))}


def belongings():
    """Resources that a process may leak. Freed memory that malloc keeps is no leak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4
    with open("/proc/self/maps") as maps:
        mapped = sum(1 for _ in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mapped,
        "resident KiB": resident,
        "shared names": len(shared_names()),
    }


def opened():
    """The targets of this process's descriptors."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(targets)


def assert_nothing_leaked(before, what):
    """Returns by how much each of the belongings has grown."""
    end = time.monotonic() + 15  # idle threads of the pool exit after some seconds
    while True:
        after = belongings()
        grown = {name: after[name] - before[name] for name in before}
        allowed = {"mappings": 8, "resident KiB": 2048}
        leaks = {name: more for name, more in grown.items() if more > allowed.get(name, 0)}
        if not leaks:
            return grown
        assert time.monotonic() < end, f"{what} leaked {leaks}; open now: {opened()}"
        time.sleep(0.05)


def one_life(rank, world, store, number):
    store = dist.PrefixStore(f"life-{number}", store)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
    total = torch.full((1000,), rank + 1.0)
    dist.all_reduce(total)
    dist.all_reduce(total, async_op=True).wait()
    works = [dist.isend(total, (rank + 1) % world), dist.irecv(torch.zeros(1000), (rank - 1) % world)]
    for work in works:
        work.wait()
    dist.destroy_process_group()


def hundred_groups(rank, world, path):
    store = dist.FileStore(path, world)
    for number in range(10):
        one_life(rank, world, store, number)
    before = belongings()
    for number in range(10, 110):
        one_life(rank, world, store, number)
    assert_nothing_leaked(before, "100 groups made and destroyed")


@pytest.mark.slow
@only_nvx
def test_a_hundred_groups_leak_nothing(ranks, tmp_path):
    ranks.run(hundred_groups, world=2, kind="bare", path=str(tmp_path / "store"))


@only_nvx
@on_ranks(2)
def test_subgroups_leak_nothing(rank, world):
    def turn():
        group = dist.new_group()
        dist.all_reduce(torch.ones(10), group=group)
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
        dist.barrier()
        dist.destroy_process_group(group)

    for _ in range(5):
        turn()
    before = belongings()
    for _ in range(40):
        turn()
    assert_nothing_leaked(before, "40 subgroups")


@only_nvx
@on_ranks(2)
def test_operations_leak_nothing(rank, world):
    def turn():
        for count in (1, 1000, 70_001):
            dist.all_reduce(torch.ones(count))
            dist.all_reduce(torch.ones(count), async_op=True).wait()
            dist.all_gather([torch.ones(count) for _ in range(world)], torch.ones(count))

    for _ in range(50):
        turn()
    before = belongings()
    for _ in range(300):
        turn()
    assert_nothing_leaked(before, "2700 operations")


@only_nvx
@on_ranks(2)
def test_idle_threads_go(rank, world):
    """Asynchronous work on many groups needs threads. They exit after the work, and idle groups have none."""
    groups = [dist.new_group() for _ in range(8)]
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    for work in [dist.all_reduce(torch.ones(1000), group=g, async_op=True) for g in groups]:
        work.wait()
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.05, "an idle group takes CPU time"
    end = time.monotonic() + 15
    while len(os.listdir("/proc/self/task")) > before[1] + 1:
        assert time.monotonic() < end, f"{len(os.listdir('/proc/self/task'))} threads, {before[1]} before"
        time.sleep(0.1)


# --- import -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2])
def test_pool_children_are_not_daemons(ranks, world):
    """The DataLoader test above needs ranks that may have children."""
    assert ranks.run(may_have_children, world=world, kind="bare") == [True] * world


def may_have_children():
    import multiprocessing

    return not multiprocessing.current_process().daemon
