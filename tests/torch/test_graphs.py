"""Collectives in captured graphs: threads simulate nvx's kernels in captures of `fake_device`.

`fake_device` replays each stream of a capture on its own thread, so work without a dependency is overtaken.
"""

import gc
import os
import signal
import time

import pytest
import test_device
import torch
import torch.distributed as dist
from broken import assert_caught
from fake_device import counts, held, peek, reset_counts, set_delays, slow_fill
from ranks import on_simulated_gpus, sync, until_it_fails
from test_device import GPU, MODES, assert_all, captured, finish, on_gpu, refuse_in_a_capture


def open_device(group=None):
    dist.all_reduce(on_gpu(1), group=group)
    torch.accelerator.synchronize()
    reset_counts()


def replayed_once(rank, group=None):
    """For two ranks: returns a tensor and a graph that sums it."""
    open_device(group)
    tensor = on_gpu(rank + 1)
    with captured() as graph:
        dist.all_reduce(tensor, group=group)
    graph.replay()
    assert_all(tensor, 3)
    return tensor, graph


def replayed_alone(rank, then):
    """For two ranks: rank 1 replays that graph again without rank 0, and then calls `then`."""
    tensor, graph = replayed_once(rank)
    if rank == 1:
        graph.replay()
        then(tensor, graph)
    sync("the other one has given up")


def gives_up(reason):
    """A replay that misses a rank ends, and its group fails."""

    def then(tensor, graph):
        torch.accelerator.synchronize()  # the kernel's timeout ends this, or the host's part
        with pytest.raises(dist.DistBackendError, match=reason):
            dist.all_reduce(tensor)
        tensor.fill_(5)
        graph.replay()
        assert_all(tensor, 5)  # a failed group writes nothing

    return then


class Tensors:
    """The tensors of one collective of each kind, with contents that depend on the rank and the round."""

    def __init__(self, rank, world, count):
        def some(n):
            return torch.zeros(n, device=GPU)

        self.rank, self.world = rank, world
        self.one, self.whole = some(count), some(count * world)
        self.parts = [some(count) for _ in range(world)]
        self.reduced, self.rooted, self.sent = some(count), some(count), some(count)
        self.gathered, self.scattered, self.mine = some(count * world), some(count), some(count)
        self.lists = [some(count) for _ in range(world)]
        self.swapped, self.tail = some(count * world), some(count)

    def fill(self, turn):
        random = torch.Generator().manual_seed(100 * turn + self.rank)
        for tensor in self.all():
            tensor.copy_(torch.randn(tensor.shape, generator=random))

    def all(self):
        single = [self.one, self.whole, self.reduced, self.rooted, self.sent, self.gathered, self.scattered]
        return [*single, self.mine, self.swapped, self.tail, *self.parts, *self.lists]

    def call(self, asynchronous):
        def run(collective, *given, **named):
            finish(collective(*given, **named, async_op=asynchronous), asynchronous)

        root = self.rank == 0
        run(dist.all_reduce, self.one)
        run(dist.broadcast, self.sent, src=self.world - 1)
        run(dist.reduce, self.rooted, dst=0)
        run(dist.all_gather, self.parts, self.one)
        run(dist.all_gather_into_tensor, self.gathered, self.mine)
        run(dist.reduce_scatter, self.reduced, self.parts)
        run(dist.reduce_scatter_tensor, self.scattered, self.whole, op=dist.ReduceOp.AVG)
        run(dist.all_to_all_single, self.swapped, self.gathered)
        run(dist.gather, self.mine, self.lists if root else None, dst=0)
        run(dist.scatter, self.tail, self.lists if root else None, src=0)
        run(dist.all_reduce, self.tail, op=dist.ReduceOp.MAX)


@MODES
@on_simulated_gpus(2, 3)
def test_every_collective_as_eager(rank, world, asynchronous):
    open_device()
    for seed, count in enumerate([0, 7, 1000, 100_003]):
        set_delays(seed, 200)
        replayed, eager = Tensors(rank, world, count), Tensors(rank, world, count)
        replayed.fill(0)
        with captured() as graph:
            replayed.call(asynchronous)
        before = [tensor.cpu() for tensor in replayed.all()]
        eager.fill(0)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(before, eager.all(), strict=True)), "a capture ran"
        for turn in range(1, 4):
            replayed.fill(turn)
            eager.fill(turn)
            graph.replay()
            eager.call(asynchronous)
            for one, other in zip(replayed.all(), eager.all(), strict=True):
                assert torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32)), (count, turn)


@on_simulated_gpus(2)
def test_nothing_stands_between_captured_kernels(rank, world):
    """A foreign node between two kernels would cost each replay about as much as a small collective."""
    open_device()
    set_delays(6, 300)
    tensor, after = on_gpu(rank + 1), on_gpu(0)
    with captured() as graph:
        for _ in range(3):
            dist.all_reduce(tensor)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        works[-1].wait()
    assert graph.nodes() == [["wait", "work", "work", "work"], ["work", "work"]]
    with torch.Stream(GPU):
        graph.replay()
    with torch.Stream(GPU):  # no stream waits for the replay, but the group's next kernel does
        dist.all_reduce(after)
        after.copy_(tensor)
        assert_all(after, 48)


@on_simulated_gpus(2)
def test_graphs_and_calls_in_turn(rank, world):
    open_device()
    set_delays(2, 300)
    first, second, third = on_gpu(0), on_gpu(0), on_gpu(0)
    with captured() as one:
        dist.all_reduce(first)
    with captured() as two:
        dist.all_reduce(second)
        dist.broadcast(first, 1)
        dist.all_reduce(second)
    for turn in range(8):
        first.fill_(rank + turn)
        second.fill_(rank + 1)
        third.fill_(turn)
        one.replay()
        dist.all_reduce(third)
        two.replay()
        work = dist.all_reduce(third, async_op=True)
        one.replay()
        one.replay()
        work.wait()
        assert_all(third, 4 * turn)
        assert_all(second, 6)
        assert_all(first, 4 * (2 * turn + 1))


@on_simulated_gpus(2)
def test_on_streams_that_do_not_wait_for_each_other(rank, world):
    """Only the group orders these streams: its kernels wait for each other in the order of the host's launches."""
    open_device()
    set_delays(4, 500)
    streams = [torch.Stream(GPU) for _ in range(3)]
    tensors = [on_gpu(0, 5000) for _ in range(3)]
    with captured() as one:
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[0])
    with captured() as two:
        dist.all_reduce(tensors[1])
    for _ in range(6):
        for tensor in tensors:
            tensor.fill_(rank + 1)
        torch.accelerator.synchronize()
        with held(streams[0]):
            one.replay(streams[0])
            two.replay(streams[1])
            with streams[2]:
                dist.all_reduce(tensors[2])
                dist.all_reduce(tensors[2])
            time.sleep(0.01)
            assert all(int(peek(tensor)[0]) == rank + 1 for tensor in tensors), "something overtook the first"
        torch.accelerator.synchronize()
        assert_all(tensors[0], 6)
        assert_all(tensors[1], 3)
        assert_all(tensors[2], 6)


@on_simulated_gpus(2)
def test_asynchronous_calls_fork_and_join(rank, world):
    """Several calls at once: some tensors are freed immediately, and another stream waits for one."""
    open_device()
    set_delays(5, 500)
    mine, after, other = on_gpu(rank + 1), on_gpu(0), torch.Stream(GPU)
    wholes, copies = ([on_gpu(0, 2000) for _ in range(4)] for _ in range(2))
    with captured() as graph:
        works = []
        for i, whole in enumerate(wholes):
            source = torch.empty(1000, device=GPU)
            source.copy_(mine)
            works.append(dist.all_gather_into_tensor(whole, source, async_op=True))
            assert works[-1].is_completed(), "a captured work cannot be queried further"
            del source  # another tensor of the capture could reuse this memory
            if i % 2 == 0:
                works[-1].wait()
                copies[i].copy_(whole)
        for work, whole, copy in zip(works, wholes, copies, strict=True):
            work.wait()
            copy.copy_(whole)
        late = dist.all_reduce(mine, async_op=True)
        other.wait_event(torch.accelerator.current_stream().record_event())
        with other:
            late.wait()
            after.copy_(mine)
        torch.accelerator.current_stream().wait_event(other.record_event())
        dist.all_reduce(after)
    assert counts()["unreused_frees"] == 0
    late.wait()  # no effect: the graph owns the work
    del works, work, late
    for turn in range(3):
        mine.fill_(rank + turn)
        graph.replay()
        for copy in copies:
            assert_all(copy[:1000], turn)
            assert_all(copy[1000:], turn + 1)
        assert_all(mine, 2 * turn + 1)
        assert_all(after, 2 * (2 * turn + 1))
    assert counts()["capture_faults"] == 0


@on_simulated_gpus(2)
def test_works_that_are_dropped_keep_what_they_use(rank, world):
    """Only the works hold these tensors until a later work is waited for."""
    open_device()
    set_delays(5, 500)
    mine, whole, last = on_gpu(0, 2400), on_gpu(0, 4800), on_gpu(0)
    with captured() as graph:
        source = torch.empty(2400, device=GPU)
        source.copy_(mine)
        dist.all_gather_into_tensor(whole, source, async_op=True)
        del source
        gc.collect()
        dist.all_reduce(last, async_op=True).wait()
        last.copy_(whole[:1000])
    assert counts()["unreused_frees"] == 0
    for turn in range(3):
        mine.fill_(rank + turn)
        graph.replay()
        assert_all(whole[:2400], turn)
        assert_all(whole[2400:], turn + 1)
        assert_all(last, turn)


@on_simulated_gpus(2)
def test_windows_futures_and_strides(rank, world):
    open_device()
    tensors = [on_gpu(0) for _ in range(3)]
    column = torch.zeros(40, 6).to(GPU).t()
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    copied = on_gpu(0)
    with captured() as graph:
        backend._start_coalescing()
        for tensor in tensors:
            backend.allreduce([tensor], dist.AllreduceOptions())
        backend._end_coalescing().wait()
        dist.all_reduce(column)
        future = dist.all_reduce(tensors[0], async_op=True).get_future()
        future.wait()
        copied.copy_(tensors[0])
    for turn in range(2):
        for tensor in (*tensors, column):
            tensor.fill_(rank + turn)
        graph.replay()
        assert_all(tensors[1], 2 * turn + 1)
        assert_all(column, 2 * turn + 1)
        assert_all(copied, 2 * (2 * turn + 1))


class Given(torch.autograd.Function):
    """A loss with a given gradient."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.gradient = gradient
        return torch.empty((), device=parameter.device).fill_(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient.clone(), None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(n, device=GPU) for n in (1000, 30_000, 7))

    def forward(self, gradients):
        return [Given.apply(weight, gradient) for weight, gradient in zip(self.weights, gradients, strict=True)]


def summed(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@on_simulated_gpus(2)
def test_a_step_of_ddp(rank, world):
    side = torch.Stream(GPU)
    with side:  # torch requires that DDP is made on the stream of the capture
        model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        model.register_comm_hook(None, summed)
        gradients = [torch.zeros_like(weight) for weight in model.module.weights]

    def step():
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(model(gradients))
        with torch.no_grad():
            for weight in model.module.weights:
                weight.copy_(weight.grad)

    with side:
        for _ in range(4):
            step()
        torch.accelerator.synchronize()
        reset_counts()
    with captured(side) as graph:
        step()
    for turn in range(1, 4):
        for i, gradient in enumerate(gradients):
            gradient.fill_(rank + i * turn)
        graph.replay()
        for i, weight in enumerate(model.module.weights):
            assert_all(weight.detach(), 2 * i * turn + 1)


# --- failures ------------------------------------------------------------------------------------------------------


@on_simulated_gpus(2, op_timeout=2)
def test_a_rank_that_does_not_replay_is_named(rank, world):
    replayed_alone(rank, gives_up(r"all_reduce.*in a graph.* after 2.00 s, waiting for rank 0"))


@on_simulated_gpus(2, op_timeout=60, dies=[1])
def test_a_rank_that_dies_ends_what_is_replayed(rank, world):
    """No rank calls the group: a thread detects the death."""
    tensor, graph = replayed_once(rank)
    time.sleep(0.3)  # nothing is in flight for a while
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    graph.replay()
    torch.accelerator.synchronize()
    assert time.monotonic() - began < 10
    with pytest.raises(dist.DistBackendError, match="rank 1 .*ended"):
        dist.all_reduce(tensor)


@on_simulated_gpus(2, op_timeout=20)
def test_graphs_that_do_not_match_are_named(rank, world):
    open_device()
    tensor = on_gpu(1)
    with captured() as one:
        dist.all_reduce(tensor)
    with captured() as two:
        dist.broadcast(tensor, 0)
    (one if rank == 0 else two).replay()
    torch.accelerator.synchronize()
    with pytest.raises(dist.DistBackendError, match="mismatch") as caught:
        until_it_fails(lambda: dist.all_reduce(tensor))
    assert "all_reduce" in str(caught.value) and "broadcast" in str(caught.value), caught.value


@on_simulated_gpus(2, fresh=True)
def test_an_aborted_group_ends_its_replays(rank, world):
    open_device()
    tensor = on_gpu(rank + 1)
    with captured() as graph:
        dist.all_reduce(tensor)
    if rank == 0:
        graph.replay()
        time.sleep(0.05)
        dist.group.WORLD.abort()
        torch.accelerator.synchronize()
        tensor.fill_(9)
        graph.replay()
        assert_all(tensor, 9)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(tensor)
    sync("both")


@on_simulated_gpus(2)
def test_a_group_that_has_gone_replays_nothing(rank, world):
    group = dist.new_group([0, 1])
    tensor, graph = replayed_once(rank, group)
    dist.destroy_process_group(group)
    dist.all_reduce(on_gpu(1))  # uses another group, which may reuse the freed memory
    graph.replay()
    assert_all(tensor, 3)
    after = on_gpu(rank + 1, 50_000)
    dist.all_reduce(after)
    assert_all(after, 3)


@on_simulated_gpus(2)
def test_destroying_a_group_waits_for_its_replays(rank, world):
    open_device()
    tensor = torch.empty(1000, device=GPU)
    with captured() as graph:
        dist.all_reduce(tensor)
    slow_fill(tensor, rank + 1, 300)
    graph.replay()
    dist.destroy_process_group()
    assert_all(tensor, 3)


# --- refused calls -------------------------------------------------------------------------------------------------


@on_simulated_gpus(2, fresh=True)
def test_the_first_collective_of_a_group_opens_the_device(rank, world):
    tensor = on_gpu(rank + 1)
    with pytest.raises(ValueError, match="Next: call one collective of the group, on all ranks, before the capture"):
        with captured():
            dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert_all(tensor, 3)
    with captured() as graph:
        dist.all_reduce(tensor)
    graph.replay()
    assert_all(tensor, 6)


@on_simulated_gpus(2)
def test_calls_that_need_the_host_are_refused_in_a_capture(rank, world):
    open_device()
    refuse_in_a_capture(rank)
    tensor, factor = on_gpu(rank + 1), on_gpu(2, count=1)
    with captured():
        with pytest.raises(
            ValueError, match="the factor of PREMUL_SUM is on .*: give a number, or a tensor of the CPU"
        ):
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        dist.all_reduce(tensor)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    dist.barrier()
    assert_all(tensor, 6)


@on_simulated_gpus(2)
def test_work_from_before_a_capture_is_not_waited_for_inside(rank, world):
    open_device()
    tensor, inside = on_gpu(rank + 1), on_gpu(rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    with captured() as graph:
        with pytest.raises(ValueError, match="Next: wait for it before the capture"):
            work.wait()
        dist.all_reduce(inside)
    work.wait()
    assert_all(tensor, 3)
    graph.replay()
    assert_all(inside, 3)


@on_simulated_gpus(2)
def test_calls_beside_a_capture(rank, world):
    """Eager calls, synchronous or not, run on another stream during the capture."""
    open_device()
    tensor, beside, stream = on_gpu(rank + 1), on_gpu(rank + 1), torch.Stream(GPU)
    with captured() as graph:
        work = dist.all_reduce(tensor, async_op=True)
        with stream:
            dist.all_reduce(beside)
            outside = dist.all_reduce(beside, async_op=True)
            outside.wait()
        work.wait()
        dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    assert_all(beside, 6)
    assert_all(tensor, rank + 1)
    graph.replay()
    assert_all(tensor, 6)


@on_simulated_gpus(2)
def test_operations_in_flight_do_not_break_a_capture(rank, world):
    """Messages without data yet, hooks that wait for an end, and queries, from any thread."""
    group, ended = dist.new_group(), []
    # torch registers hooks only with the default backend.
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    open_device(group)
    open_device()
    group._register_on_completion_hook(ended.append)
    tensor, beside, got, side = on_gpu(rank + 1), on_gpu(rank + 1), on_gpu(0), torch.Stream(GPU)
    late = torch.empty(1000, device=GPU)
    torch.accelerator.synchronize()
    with held(side), side:
        late.fill_(rank + 5)
        outside = dist.all_reduce(beside, group=group, async_op=True)
        sent = dist.isend(late, 1 - rank, group=group)
        received = dist.irecv(got, 1 - rank, group=group)
    with captured() as graph:
        dist.all_reduce(tensor)
        with held(side):
            with side:
                again = dist.all_reduce(beside, group=group, async_op=True)
                assert not again.is_completed()
            time.sleep(0.05)
        dist.all_reduce(tensor, async_op=True).wait()
        assert come(ended, 4)
    with side:
        for work in (outside, sent, received, again):
            work.wait()
    torch.accelerator.synchronize()
    assert_all(beside, 6)
    assert_all(got, 6 - rank)
    graph.replay()
    assert_all(tensor, 6)


def come(ended, count):
    end = time.monotonic() + 30
    while len(ended) < count and time.monotonic() < end:
        time.sleep(0.005)
    return len(ended) >= count


@on_simulated_gpus(2, op_timeout=60)
def test_a_rank_that_has_left_ends_what_is_replayed(rank, world):
    """The rank leaves in order, long before any timeout."""
    tensor, graph = replayed_once(rank)
    dist.all_reduce(tensor)
    graph.replay()
    assert_all(tensor, 12)
    if rank == 1:
        dist.destroy_process_group()
        return
    time.sleep(0.5)  # a rank that has left is missed only when another rank waits for it
    assert dist.group.WORLD._get_backend(torch.device(GPU)).get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    began = time.monotonic()
    graph.replay()
    torch.accelerator.synchronize()
    assert time.monotonic() - began < 20
    with pytest.raises(dist.DistBackendError, match="rank 1 .*has left"):
        dist.all_reduce(tensor)


# --- negative controls -----------------------------------------------------------------------------------------------


# The next call reports a broken capture: the query itself, or the call behind it.
BROKEN_CAPTURE = r"beside this capture|assert not again\.is_completed"


@pytest.mark.parametrize(
    "rule, test, reason",
    [
        ("event_waits", test_on_streams_that_do_not_wait_for_each_other, "something overtook the first"),
        ("recorded_use", test_device.test_the_user_may_let_go_of_tensors_at_once, " wanted, got"),  # free before done
        ("capture_mode", test_operations_in_flight_do_not_break_a_capture, BROKEN_CAPTURE),
    ],
    ids=["event_waits", "recorded_use", "capture_mode"],
)
def test_a_broken_rule_is_caught(simulated_gpus, rule, test, reason):
    assert_caught(simulated_gpus, rule, test, reason)
