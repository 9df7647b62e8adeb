"""Captured collectives over two hosts: the host has a part between them in each replay. The tests of `test_graphs.py`
apply, except those that only kernels can pass."""

import pytest
import test_graphs
import torch
import torch.distributed as dist
from fake_device import set_delays
from ranks import on_proxied_gpus, only_nvx
from test_device import GPU, MODES, assert_all, captured, on_gpu
from test_graphs import gives_up, open_device, replayed_alone

pytestmark = only_nvx
GRAPHS = test_graphs
LARGE = 3_333_333  # several slices

test_every_collective = MODES(on_proxied_gpus(2, 3, 4)(GRAPHS.test_every_collective_as_eager.body))
test_graphs_and_calls = on_proxied_gpus(2)(GRAPHS.test_graphs_and_calls_in_turn.body)
test_on_streams = on_proxied_gpus(2)(GRAPHS.test_on_streams_that_do_not_wait_for_each_other.body)
test_fork_and_join = on_proxied_gpus(2)(GRAPHS.test_asynchronous_calls_fork_and_join.body)
test_works_that_are_dropped = on_proxied_gpus(2)(GRAPHS.test_works_that_are_dropped_keep_what_they_use.body)
test_windows_and_futures = on_proxied_gpus(2)(GRAPHS.test_windows_futures_and_strides.body)
test_a_step_of_ddp = on_proxied_gpus(2)(GRAPHS.test_a_step_of_ddp.body)
test_death = on_proxied_gpus(2, op_timeout=60, dies=[1])(GRAPHS.test_a_rank_that_dies_ends_what_is_replayed.body)
test_mismatch = on_proxied_gpus(2, op_timeout=20)(GRAPHS.test_graphs_that_do_not_match_are_named.body)
test_abort = on_proxied_gpus(2, fresh=True)(GRAPHS.test_an_aborted_group_ends_its_replays.body)
test_gone = on_proxied_gpus(2)(GRAPHS.test_a_group_that_has_gone_replays_nothing.body)
test_goes = on_proxied_gpus(2)(GRAPHS.test_destroying_a_group_waits_for_its_replays.body)
test_first_call = on_proxied_gpus(2, fresh=True)(GRAPHS.test_the_first_collective_of_a_group_opens_the_device.body)
test_calls_that_need_the_host_are_refused_in_a_capture = on_proxied_gpus(2)(
    GRAPHS.test_calls_that_need_the_host_are_refused_in_a_capture.body
)
test_begun_outside = on_proxied_gpus(2)(GRAPHS.test_work_from_before_a_capture_is_not_waited_for_inside.body)
test_in_flight = on_proxied_gpus(2)(GRAPHS.test_operations_in_flight_do_not_break_a_capture.body)
test_beside_a_capture = on_proxied_gpus(2)(GRAPHS.test_calls_beside_a_capture.body)


@MODES
@on_proxied_gpus(2, 4)
def test_large_ones(rank, world, asynchronous):
    open_device()
    set_delays(rank, 300)
    tensor, whole = torch.empty(LARGE).to(GPU), torch.empty(world * LARGE, device=GPU)
    with captured() as graph:
        for call in (
            lambda: dist.all_reduce(tensor, async_op=asynchronous),
            lambda: dist.all_gather_into_tensor(whole, tensor, async_op=asynchronous),
            lambda: dist.broadcast(whole, 1, async_op=asynchronous),
        ):
            work = call()
            if work is not None:
                work.wait()
    for turn in range(3):
        tensor.fill_(rank + turn)
        graph.replay()
        graph.replay()
        dist.all_reduce(tensor)
        once = world * (world - 1) / 2 + world * turn
        assert torch.equal(whole.cpu()[::99], torch.full((len(whole[::99]),), world * once))
        assert torch.equal(tensor.cpu()[::99], torch.full((len(tensor[::99]),), world * world * once))


@on_proxied_gpus(2)
def test_many_replays_in_a_row(rank, world):
    """The host's part of one replay may still run when the next replay begins."""
    open_device()
    set_delays(rank, 50)
    tensor = on_gpu(1)
    with captured() as graph:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    for _ in range(20):
        graph.replay()
    assert_all(tensor, 2**20)


@on_proxied_gpus(2, op_timeout=2)
def test_a_rank_that_does_not_replay_is_named(rank, world):
    replayed_alone(rank, gives_up(r"all_reduce.* after 2.* s, waiting for rank 0"))


@on_proxied_gpus(2, op_timeout=2)
def test_a_barrier_does_not_pass_over_a_replay_that_fails(rank, world):
    def then(tensor, graph):
        with pytest.raises(dist.DistBackendError, match="waiting for rank 0"):
            dist.barrier()

    replayed_alone(rank, then)
