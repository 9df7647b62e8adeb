"""Captured calls are not delegated: nvx's kernels serve them, beside a backend that serves eager calls."""

import time

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from fake_device import counts, held, reset_counts, set_delays
from test_delegate import LARGE, is_delegated, on_simulated_nccl_gpus
from test_device import GPU, MODES, assert_all, captured, finish, on_gpu


def open_all():
    """One eager call opens the device for kernels and connects the backend."""
    dist.broadcast(on_gpu(1), 0)
    assert fake_nccl.calls() == {"connect": 1, "broadcast": 1}
    torch.accelerator.synchronize()
    reset_counts()


@MODES
@on_simulated_nccl_gpus(2)
def test_captured_calls_stay_with_kernels(rank, world, asynchronous):
    open_all()
    tensor = on_gpu(0, LARGE)

    def capture():
        with captured() as graph:
            finish(dist.all_reduce(tensor, async_op=asynchronous), asynchronous)
            finish(dist.broadcast(tensor, 1, async_op=asynchronous), asynchronous)
        return graph

    graphs = []
    assert not is_delegated(lambda: graphs.append(capture()))
    for turn in range(3):
        tensor.fill_(rank + turn)
        assert not is_delegated(graphs[0].replay)
        assert_all(tensor, 2 * turn + 1)
    assert is_delegated(lambda: dist.all_reduce(tensor))
    assert_all(tensor, 10)


@on_simulated_nccl_gpus(2)
def test_a_first_call_in_a_capture_is_refused_and_the_capture_goes_on(rank, world):
    """As without a delegate, the hosts open the device together. They also connect no delegate in a capture."""
    tensor, inside = on_gpu(rank, LARGE), on_gpu(rank)
    reset_counts()
    with captured():
        with pytest.raises(ValueError, match="call one collective of the group, on all ranks, before the capture"):
            dist.all_reduce(tensor)
        inside.fill_(1)
    dist.all_reduce(tensor)
    assert_all(tensor, 1)


@on_simulated_nccl_gpus(2)
def test_replays_and_delegated_calls_in_turn(rank, world):
    """Replays and delegated calls on several streams use the same tensor: each waits for the previous one."""
    open_all()
    set_delays(3, 400)
    tensor = on_gpu(0, LARGE)
    with captured() as graph:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    streams = [torch.Stream(GPU) for _ in range(3)]
    tensor.fill_(rank)
    torch.accelerator.synchronize()
    for turn in range(9):
        with streams[turn % 3] as stream:
            graph.replay(stream)
        # The caller makes no stream wait for another: only the group orders the calls.
        with streams[(turn + 1) % 3]:
            dist.all_reduce(tensor)
        with streams[(turn + 2) % 3]:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    torch.accelerator.synchronize()
    assert_all(tensor, 0.5 * 2**9)


@on_simulated_nccl_gpus(2)
def test_watching_a_delegated_call_breaks_no_capture(rank, world):
    open_all()
    tensor = on_gpu(rank, LARGE)
    inside = on_gpu(rank, 3)
    with held():
        dist.all_reduce(tensor)  # in flight during the next capture
        with captured(torch.Stream(GPU)) as graph:
            dist.all_reduce(inside)
            time.sleep(1)  # enough time for many polls
    assert counts()["capture_faults"] == 0
    assert_all(tensor, 1)
    graph.replay()
    torch.accelerator.synchronize()
    dist.all_reduce(on_gpu(1, LARGE))
