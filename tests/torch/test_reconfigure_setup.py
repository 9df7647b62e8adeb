"""Calls and failures during the set-up of a group whose ranks change."""

import os
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import warm
from ranks import BACKEND, eventually, only_nvx
from reconfiguring import (
    arrive,
    begin,
    check_group,
    come_together,
    connect,
    exchange,
    here,
    of_nobody,
    own_backend,
    reconfigure,
    runner,
)
from test_device import GPU

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch has no reconfigure")


@pytest.fixture
def started(ranks):
    """Runs a body in every rank, without a group, over a store that outlives any of them."""
    return runner(ranks)


@pytest.fixture
def started_on_simulated(simulated_gpus):
    """The same, with kernels simulated on an accelerator in each rank."""
    return runner(simulated_gpus)


def not_waited_for(rank, world, port):
    store = arrive(port, rank, world)
    handles = exchange(store, "first", rank, range(world))
    if rank == 0:
        work = reconfigure(1, handles)
        time.sleep(0.3)
        assert not work.is_completed() and here() == (0, world)
        with pytest.raises(RuntimeError, match="timed out.*goes on"):
            work.wait(timedelta(milliseconds=50))
        with pytest.raises(RuntimeError, match="being reconfigured already"):
            reconfigure(2, handles)
        come_together(store, "rank 0 has looked", world)
        check_group(0, world)  # waits for the set-up
        work.get_future().wait()
        assert work.is_completed() and work.result() == []
    else:
        come_together(store, "rank 0 has looked", world)
        reconfigure(1, handles)
        check_group(1, world)


@only_nvx
def test_calls_wait_for_the_reconfigured_group(started):
    started(not_waited_for, 2)


def synchronized(rank, world, port):
    """torch calls synchronize() with the GIL."""
    arrive(port, rank, 2)
    own = dist._get_reconfigure_handle()
    work = reconfigure(1, [own, of_nobody(own)])
    threading.Timer(0.3, dist.group.WORLD.abort).start()
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        work.synchronize()
    assert time.monotonic() - began < 5


@only_nvx
def test_synchronize_lets_other_threads_run(started):
    started(synchronized, 1)


def aborted_whole(rank, world, port):
    """torch aborts the default group inside a coalescing scope if the group supports one."""
    store = arrive(port, rank, world)
    assert not own_backend().supports_coalescing
    dist.distributed_c10d._abort_process_group()
    for uuid, seconds in ((1, 20), (2, 0.3)):  # one is being set up, the other has failed
        begin(store, rank, world)
        own = dist._get_reconfigure_handle()
        work = reconfigure(uuid, [own, of_nobody(own)], seconds=seconds)
        if seconds < 1:
            with pytest.raises(dist.DistBackendError, match="not arrive"):
                work.wait()
        began = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        assert time.monotonic() - began < 5
        with pytest.raises(dist.DistBackendError):
            work.wait()
    begin(store, rank, world)
    assert reconfigure(3, [dist._get_reconfigure_handle()]).wait()
    assert own_backend().supports_coalescing
    check_group(0, 1)
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._abort_process_group()


@only_nvx
def test_the_whole_job_is_aborted_in_any_state(started):
    started(aborted_whole, 1)


def extended(rank, world, port):
    """torch.compile extends the timeouts of all groups, and ignores those that cannot."""
    arrive(port, rank, world, seconds=1)
    more = timedelta(seconds=1)
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(more)
    own = dist._get_reconfigure_handle()
    work = reconfigure(1, [own, of_nobody(own)])
    began = time.monotonic()
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(more)
    assert time.monotonic() - began < 5 and not work.is_completed()
    dist.group.WORLD.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        work.wait()
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(more)
    assert reconfigure(2, [dist._get_reconfigure_handle()]).wait()
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(more)
    check_group(0, 1)


@only_nvx
def test_timeouts_are_extended_in_any_state(started):
    started(extended, 1)


def without_a_timeout(rank, world, port):
    store = connect(port)
    dist.init_process_group(
        BACKEND, store=store, rank=rank, world_size=world, timeout=timedelta.max, enable_reconfigure=True
    )
    handles = exchange(store, "first", rank, range(world))
    assert dist._reconfigure(uuid=1, handles=handles).wait()
    check_group(rank, world)
    with pytest.raises(ValueError, match="negative"):
        dist._reconfigure(uuid=2, handles=handles, timeout=timedelta(seconds=-1))


@only_nvx
def test_a_group_without_a_timeout_is_reconfigured(started):
    started(without_a_timeout, 2)


def cancelled(rank, world, port):
    store = arrive(port, rank, world)
    handles = exchange(store, "first", rank, range(world))
    if rank == 0:
        work = reconfigure(1, handles)
        began = time.monotonic()
        dist.group.WORLD.abort()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        assert time.monotonic() - began < 3
        with pytest.raises(dist.DistBackendError, match="has not been initialized.*aborted"):
            dist.barrier()
        assert reconfigure(2, handles[:1]).wait()
        check_group(0, 1)
    come_together(store, "cancelled", world)
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            reconfigure(1, handles).wait()
    assert reconfigure(3, exchange(store, "second", rank, range(world))).wait()
    check_group(rank, world)
    if rank == 0:
        work = reconfigure(4, handles[1:] + [dist._get_reconfigure_handle()])
    come_together(store, "rank 0 has begun again", world)  # and leaves now


@only_nvx
def test_abort_ends_the_setup(started):
    started(cancelled, 2)


def cancelled_at_the_end(rank, world, port):
    arrive(port, rank, world)
    spans = []
    for turn in range(150):
        began = time.monotonic()
        work = reconfigure(turn, [dist._get_reconfigure_handle()])
        if turn < 10:
            assert work.wait()
            spans.append(time.monotonic() - began)
            continue
        until = began + min(spans) * (0.5 + turn / 150)
        while time.monotonic() < until:
            pass
        dist.group.WORLD.abort()
        eventually(work.is_completed)
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(torch.ones(1))


@only_nvx
def test_no_abort_is_lost_when_the_setup_ends(started):
    started(cancelled_at_the_end, 1)


def interrupted(rank, world, port):
    arrive(port, rank, 2)
    own = dist._get_reconfigure_handle()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for uuid, wait in ((1, lambda work: work.wait()), (2, lambda work: dist.barrier())):
        work = reconfigure(uuid, [own, of_nobody(own)])
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait(work)
        assert time.monotonic() - began < 3
        eventually(work.is_completed)
        assert not work.is_success()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert reconfigure(3, [own]).wait()
    check_group(0, 1)


@only_nvx
def test_ctrl_c_ends_the_setup(started):
    started(interrupted, 1)


def errors_told(rank, world, port):
    arrive(port, rank, 2)
    own = dist._get_reconfigure_handle()
    kinds = torch._C._distributed_c10d.ErrorType
    for uuid in (1, 2):
        work = reconfigure(uuid, [own, of_nobody(own)])
        assert own_backend().get_error() == kinds.SUCCESS  # independent of the previous group's state
        dist.group.WORLD.abort()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        assert own_backend().get_error() == kinds.COMM_ERROR


@only_nvx
def test_an_error_is_that_of_the_last_reconfigure(started):
    started(errors_told, 1)


def forked(rank, world, port):
    store = arrive(port, rank, world)
    handles = exchange(store, "first", rank, range(world))
    if rank == 0:
        work = reconfigure(1, handles)
        child = os.fork()
        if child == 0:
            code = 0
            for call in (work.wait, work.get_future):
                try:
                    call()
                    code = 1
                except RuntimeError as error:
                    code = code or (0 if "forked" in str(error) else 2)
            dist.group.WORLD.abort()  # no effect
            os._exit(code)
        ended = []
        try:
            eventually(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0] == child)
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            raise
        assert os.waitstatus_to_exitcode(ended[-1][1]) == 0
        assert not work.is_completed()
    come_together(store, "the child has ended", world)
    if rank != 0:
        work = reconfigure(1, handles)
    assert work.wait()
    check_group(rank, world)


@only_nvx
def test_a_forked_child_does_not_wait_for_the_work(started):
    started(forked, 2)


LEAVES = """
import atexit, sys, torch, torch.distributed as dist
def end():  # nvx's own comes after the program's handlers
    sys.modules["nvx._C"]._stop()
    print("ended:", work.is_completed(), flush=True)
atexit.register(end)
import nvx
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("nvx", store=store, rank=0, world_size=2, enable_reconfigure=True)
own = dist._get_reconfigure_handle()
fields = own.split(":")
fields[5] = f"{int(fields[5], 16) ^ 1:016x}"
work = dist._reconfigure(uuid=1, handles=[own, ":".join(fields)])
"""


def run_alone(code, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = warm.Popen(["-c", code], env={**os.environ, **environment}, **pipes)
    try:
        out, err = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, err
    return out


@only_nvx
def test_a_setup_ends_before_the_process_is_torn_down():
    assert run_alone(LEAVES) == "ended: True\n"


@only_nvx
def test_a_setup_whose_call_gives_no_timeout_ends_after_that_of_the_environment():
    waits = "try:\n    work.wait()\nexcept dist.DistBackendError as error:\n    print(error)\n"
    assert re.search(r"timed out after \d\.", run_alone(LEAVES + waits, NVX_TIMEOUT_S="1"))


def device_of_a_setup(rank, world, port):
    """All ranks open devices together or not at all, so a rank that opens one waits for the others."""
    import nvx

    store = arrive(port, rank, world, seconds=40)
    device = torch.device(GPU, 0)
    if rank == 0:
        own_backend().eager_connect_single_device(device)
    work = reconfigure(1, exchange(store, "first", rank, range(world)))
    if rank == 1:
        assert work.wait()
    come_together(store, "rank 1 has its group", world)
    if rank == 0:
        time.sleep(0.3)
        assert not work.is_completed()
        began = time.monotonic()
        dist.group.WORLD.abort()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        assert time.monotonic() - began < 3
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.recv(torch.zeros(1), 0)
    handles = exchange(store, "second", rank, range(world))
    if rank == 1:
        work = reconfigure(2, handles)
        time.sleep(0.3)  # it has looked for a device by now
        store.set("rank 1 is in the set-up", "")
        own_backend().eager_connect_single_device(device)
    else:
        store.get("rank 1 is in the set-up")
        time.sleep(0.3)
        work = reconfigure(2, handles)
    began = time.monotonic()
    assert work.wait() and time.monotonic() - began < 5
    assert nvx.pool_stats() is not None
    check_group(rank, world)


@only_nvx
def test_a_setup_is_aborted_while_it_opens_a_device(started_on_simulated):
    started_on_simulated(device_of_a_setup, 2)


def timed_during_setup(rank, world, port):
    import nvx

    store = arrive(port, rank, world, seconds=40)
    handles = exchange(store, "first", rank, range(world))
    if rank == 0:
        work = reconfigure(1, handles, seconds=20)
        time.sleep(0.3)  # it has read the options by now
        nvx.set_timeout(timedelta(seconds=1))
    come_together(store, "the timeout is set", world)
    if rank == 1:
        work = reconfigure(1, handles, seconds=20)
    assert work.wait()
    check_group(rank, world)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            dist.recv(torch.zeros(1), 1)
        assert time.monotonic() - began < 10
    come_together(store, "time is up", world)


@only_nvx
def test_a_timeout_that_is_set_during_the_setup_holds(started):
    started(timed_during_setup, 2)
