"""What is captured is not handed over: beside a backend that serves eager calls, nvx's kernels serve it."""

import time

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from fake_device import counts, held, reset_counts, set_delays
from test_delegate import LARGE, is_handed_over, on_played_nccl_gpus
from test_device import GPU, MODES, assert_all, captured, finish, on_gpu


def open_all():
    """One eager call opens the device for kernels, and connects the backend."""
    dist.broadcast(on_gpu(1), 0)
    assert fake_nccl.calls() == {"connect": 1, "broadcast": 1}
    torch.accelerator.synchronize()
    reset_counts()


@MODES
@on_played_nccl_gpus(2)
def test_what_is_captured_stays_with_kernels(rank, world, asynchronous):
    open_all()
    tensor = on_gpu(0, LARGE)

    def capture():
        with captured() as graph:
            finish(dist.all_reduce(tensor, async_op=asynchronous), asynchronous)
            finish(dist.broadcast(tensor, 1, async_op=asynchronous), asynchronous)
        return graph

    graphs = []
    assert not is_handed_over(lambda: graphs.append(capture()))
    for turn in range(3):
        tensor.fill_(rank + turn)
        assert not is_handed_over(graphs[0].replay)
        assert_all(tensor, 2 * turn + 1)
    assert is_handed_over(lambda: dist.all_reduce(tensor))
    assert_all(tensor, 10)


@on_played_nccl_gpus(2)
def test_a_first_call_in_a_capture_is_refused_and_the_capture_goes_on(rank, world):
    """As without a delegate: hosts open the device together. They do not meet for the delegate in a capture either."""
    tensor, inside = on_gpu(rank, LARGE), on_gpu(rank)
    reset_counts()
    with captured():
        with pytest.raises(ValueError, match="call one collective of the group, on all ranks, before the capture"):
            dist.all_reduce(tensor)
        inside.fill_(1)
    dist.all_reduce(tensor)
    assert_all(tensor, 1)


@on_played_nccl_gpus(2)
def test_replays_and_what_is_handed_over_in_turn(rank, world):
    """On several streams, of the same tensor: each waits for the one before."""
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
        # No stream waits for another by the caller's doing: the group's order is all that there is.
        with streams[(turn + 1) % 3]:
            dist.all_reduce(tensor)
        with streams[(turn + 2) % 3]:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    torch.accelerator.synchronize()
    assert_all(tensor, 0.5 * 2**9)


@on_played_nccl_gpus(2)
def test_who_looks_after_what_was_handed_over_breaks_no_capture(rank, world):
    open_all()
    tensor = on_gpu(rank, LARGE)
    inside = on_gpu(rank, 3)
    with held():
        dist.all_reduce(tensor)  # in flight while the next is captured
        with captured(torch.Stream(GPU)) as graph:
            dist.all_reduce(inside)
            time.sleep(1)  # many looks
    assert counts()["capture_faults"] == 0
    assert_all(tensor, 1)
    graph.replay()
    torch.accelerator.synchronize()
    dist.all_reduce(on_gpu(1, LARGE))
