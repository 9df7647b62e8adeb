"""Set-up of delegation: ranks connect a backend, or all agree not to delegate."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from fake_device import held, queries_fail
from ranks import SEVERAL_HOSTS, stderr_lines, sync
from test_delegate import LARGE, SMALL, on_nccl_gpus, raises_before_long
from test_device import assert_all, on_gpu
from test_device_groups import listen
from test_interrupts import interrupted


def falls_back(rank, world, most=20):
    """An all-reduce that would be delegated falls back on all ranks for good; returns the log text."""
    began = time.monotonic()
    with stderr_lines() as lines:
        for _ in range(2):
            tensor = on_gpu(rank + 1, LARGE)
            dist.all_reduce(tensor)
            assert_all(tensor, sum(range(1, world + 1)))
    assert time.monotonic() - began < most
    warning = [line for line in lines if "NVX_DELEGATE has no effect" in line]
    assert len(warning) == (rank == 0), lines
    return "".join(warning)


@pytest.mark.skipif(SEVERAL_HOSTS, reason="of each host's GPUs by themselves")
@on_nccl_gpus(3)
def test_ranks_that_share_a_gpu_delegate_nothing(rank, world):
    count = len(fake_nccl.made)
    with fake_nccl.looking("0000:01" if rank else "0000:02"):
        warning = falls_back(rank, world)
    assert len(fake_nccl.made) == count, "nothing was made"
    if rank == 0:
        assert "rank 1 " in warning and "rank 2 " in warning
        assert "share the GPU 0000:01, and NCCL needs one GPU for each rank" in warning


@on_nccl_gpus(2)
def test_a_rank_without_nccl_keeps_all_from_delegating(rank, world):
    with fake_nccl.looking("", "this torch has none") if rank else contextlib.nullcontext():
        warning = falls_back(rank, world)
    assert rank or ("rank 1 " in warning and "this torch has none" in warning)


@on_nccl_gpus(2)
def test_a_rank_whose_probe_fails_counts_as_without_nccl(rank, world):
    import nvx.delegate

    before = nvx.delegate.probe
    if rank:
        nvx.delegate.probe = lambda device: 1 / 0
    try:
        warning = falls_back(rank, world)
    finally:
        nvx.delegate.probe = before
    assert rank or "rank 1 " in warning and "ZeroDivisionError" in warning


@on_nccl_gpus(2, op_timeout=100)
def test_no_rank_delegates_if_one_cannot_make_the_backend(rank, world):
    """The other rank waits for it while it connects, which is aborted."""
    import nvx.delegate

    before = nvx.delegate.make
    if rank:
        nvx.delegate.make = lambda *given: 1 / 0
    try:
        warning = falls_back(rank, world)
    finally:
        nvx.delegate.make = before
    if rank == 0:
        assert fake_nccl.calls() == {"connect": 1, "abort": 1}
        assert "rank 1 " in warning and "ZeroDivisionError" in warning and "\n" not in warning


@on_nccl_gpus(3, op_timeout=100)
def test_no_rank_delegates_if_one_cannot_connect(rank, world):
    with fake_nccl.connecting("no route to rank 0\nand more") if rank == 1 else contextlib.nullcontext():
        warning = falls_back(rank, world)
    assert fake_nccl.calls() == {"connect": 1, "abort": 1}
    assert rank or ("rank 1 " in warning and "no route to rank 0" in warning and "more" not in warning)


@on_nccl_gpus(2)
def test_a_rank_that_has_connected_follows_one_that_has_not(rank, world):
    """It releases its backend."""
    import nvx.delegate

    before = nvx.delegate.make

    def alone(store, rank, size, device):
        return before(dist.PrefixStore("alone", store), 0, 1, device)

    nvx.delegate.make = (lambda *given: 1 / 0) if rank else alone
    try:
        warning = falls_back(rank, world)
    finally:
        nvx.delegate.make = before
    if rank == 0:
        assert fake_nccl.calls() == {"connect": 1, "abort": 1}
        assert "rank 1 " in warning and "ZeroDivisionError" in warning


@on_nccl_gpus(2, op_timeout=4)
def test_connecting_that_does_not_end_ends_in_half_of_the_timeout(rank, world):
    with fake_nccl.connecting("hang"):
        warning = falls_back(rank, world)
    assert rank or "it was not connected within 2000 ms, half of the group's timeout" in warning
    assert fake_nccl.calls() == {"connect": 1, "abort": 1}


@on_nccl_gpus(2, op_timeout=4)
def test_a_rank_that_hangs_is_named_though_all_wait_for_it(rank, world):
    """The hung rank and the ranks that wait for it time out together: the message may name any of them, and all fall
    back."""
    with fake_nccl.connecting("hang") if rank else contextlib.nullcontext():
        warning = falls_back(rank, world)
    assert rank or "half of the group's timeout" in warning


@on_nccl_gpus(2, op_timeout=4, store="tcp")
def test_a_wait_in_the_store_ends_in_half_of_the_timeout(rank, world):
    """The wait cannot be aborted either: its thread is abandoned."""
    with fake_nccl.connecting("wait"):
        warning = falls_back(rank, world)
    assert rank or "half of the group's timeout" in warning


@on_nccl_gpus(2, op_timeout=100)
def test_an_abort_ends_connecting(rank, world):
    tensor = on_gpu(1, LARGE)
    with fake_nccl.connecting("hang"):
        if rank == 0:
            timer = threading.Timer(0.5, dist.group.WORLD.abort)
            timer.start()
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(tensor)
        assert time.monotonic() - began < 15
        if rank == 0:
            timer.join()
    assert fake_nccl.calls() == {"connect": 1, "abort": 1}


@on_nccl_gpus(2, op_timeout=100)
def test_ctrl_c_ends_connecting(rank, world):
    tensor = on_gpu(1, LARGE)
    with fake_nccl.connecting("hang"):
        if rank == 0:
            assert interrupted(lambda: dist.all_reduce(tensor)) < 15
        else:
            with pytest.raises(dist.DistBackendError, match="interrupted by the user.*rank 0"):
                dist.all_reduce(tensor)
    assert fake_nccl.calls() == {"connect": 1, "abort": 1}
    sync("both were notified")


@pytest.mark.skipif(SEVERAL_HOSTS, reason="a rank of another host that dies is missed when the time is up")
@on_nccl_gpus(3, op_timeout=100, dies=[1])
def test_a_rank_that_dies_while_connecting_is_named_soon(rank, world):
    tensor = on_gpu(1, LARGE)
    if rank == 1:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with fake_nccl.connecting("hang"):
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1 .*ended"):
            dist.all_reduce(tensor)
        assert time.monotonic() - began < 20
    assert fake_nccl.calls() == {"connect": 1, "abort": 1}


@on_nccl_gpus(2, op_timeout=2)
def test_a_rank_that_does_not_come_to_agree_is_named(rank, world):
    dist.all_reduce(on_gpu(1, SMALL))
    if rank == 0:
        message = "rank 1 did not join.*while the ranks agreed on what to delegate"
        with pytest.raises(dist.DistBackendError, match=message):
            dist.all_reduce(on_gpu(1, LARGE))
    sync("rank 0 has given up")


def until_cancelled(most=20):
    end = time.monotonic() + most
    while "abort" not in fake_nccl.calls():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("listening", [False, True])
@on_nccl_gpus(2)
def test_a_device_that_gives_no_answer_fails_the_group(rank, world, listening):
    """The failure must not terminate the caller, the thread that polls pending operations, or the thread that calls
    hooks."""
    group, tensor, infos = dist.new_group(), on_gpu(1, LARGE), []
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    if listening:
        listen(group, infos.append)
    if rank == 0:
        with held():
            work = dist.all_reduce(tensor, group=group, async_op=True)
            with queries_fail():  # not before: the first call's end may not have been queried yet
                raises_before_long("failed on the device: .*an illegal memory access", work.wait)
                until_cancelled()
    else:
        raises_before_long("illegal memory access.*reported by rank 0", lambda: dist.all_reduce(tensor, group=group))
        until_cancelled()
    assert fake_nccl.calls()["abort"] == 1
    torch.accelerator.synchronize()


def test_nccl_is_made_so_that_it_ends_no_process(monkeypatch):
    """A class stands in for NCCL's: the test checks its arguments and the environment that it reads."""
    from nvx import delegate

    class StandIn:
        class Options:
            _timeout = None

        def __init__(self, store, rank, size, options):
            self.given = (store, rank, size)
            self.timeout = options._timeout
            self.environment = {name: os.environ.get(name) for name in delegate.PROBE_ENV}

    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    made = delegate.make("store", 1, 2, torch.device("cuda:0"))
    assert made.given == ("store", 1, 2) and made.timeout > timedelta(days=300)
    assert set(made.environment.values()) == {"0"} and len(made.environment) == 6
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1" and "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_probe_returns_the_reason_against_nccl(monkeypatch):
    from nvx import delegate

    gpu, why_not = delegate.probe(torch.device("cpu"))
    assert not gpu and "serves CUDA tensors" in why_not
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    gpu, why_not = delegate.probe(torch.device("cuda:0"))
    assert not gpu and "without NCCL: nvx cannot delegate to it" in why_not
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    facts = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1A, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert delegate.probe(torch.device("cuda:0")) == ("00000001:1a:02", "")
