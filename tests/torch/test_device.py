"""Tensors of an accelerator that go through host memory: stream order, lifetime, results, errors.

The accelerator is `fake_device`: its streams are slow, and memory that is freed too early is poisoned.
"""

import contextlib
import importlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from broken import assert_caught
from fake_device import capture, counts, held, peek, reset_counts, set_delays, slow_fill
from ranks import TORCH, argument_error, on_fake_gpus, only_nvx, sync

GPU = "fakegpu"
COUNTS = [0, 1, 7, 1000, 300_007]
MODES = pytest.mark.parametrize("asynchronous", [False, True])


def on_gpu(value, count=1000, dtype=torch.float32):
    return torch.full((count,), value, dtype=dtype).to(GPU)


def finish(work, asynchronous):
    if asynchronous:
        work.wait()


def assert_all(tensor, value):
    host = tensor.cpu()
    assert torch.equal(host, torch.full_like(host, value)), f"{value} wanted, got {host}"


@contextlib.contextmanager
def captured(stream=None, mode="global"):
    """A `capture()` that asserts that no call in it is one that CUDA forbids."""
    with capture(stream, mode) as graph:
        yield graph
    assert counts()["capture_faults"] == 0


def refuse_in_a_capture(rank, mode="global"):
    """Calls that need the host are refused; the capture stays valid."""
    tensor, inside = on_gpu(rank), on_gpu(rank + 1)
    calls = [
        lambda: dist.send(tensor, 1 - rank),
        lambda: dist.recv(tensor, 1 - rank),
        lambda: dist.barrier(),
        lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=5), wait_all_ranks=False),
    ]
    with captured(mode=mode):
        for call in calls:
            with pytest.raises(ValueError, match="goes through host memory.*only collectives that nvx's kernels"):
                call()
        inside.fill_(1)
    assert counts()["pinned_allocations"] == 0


@MODES
@on_fake_gpus(2, 3)
def test_every_collective(rank, world, asynchronous):
    total = sum(range(1, world + 1))
    for seed, count in enumerate(COUNTS):
        set_delays(seed, 300)

        def call(collective, *given, **named):
            finish(collective(*given, **named, async_op=asynchronous), asynchronous)

        def mine(count=count):
            return on_gpu(rank + 1, count)

        def empty(count=count):
            return torch.empty(count, device=GPU)

        tensor = mine()
        call(dist.all_reduce, tensor)
        assert_all(tensor, total)
        tensor = mine()
        call(dist.broadcast, tensor, src=world - 1)
        assert_all(tensor, world)
        tensor = mine()
        call(dist.reduce, tensor, dst=0)
        assert_all(tensor, total if rank == 0 else rank + 1)
        parts = [empty() for _ in range(world)]
        call(dist.all_gather, parts, mine())
        for r, part in enumerate(parts):
            assert_all(part, r + 1)
        whole = empty(count * world)
        call(dist.all_gather_into_tensor, whole, mine())
        for r, part in enumerate(whole.chunk(world) if count else []):
            assert_all(part, r + 1)
        part = empty()
        call(dist.reduce_scatter, part, [mine() for _ in range(world)])
        assert_all(part, total)
        part = empty()
        call(dist.reduce_scatter_tensor, part, mine(count * world), op=dist.ReduceOp.AVG)
        assert_all(part, total / world)
        parts = [empty() for _ in range(world)]
        call(dist.all_to_all, parts, [mine() for _ in range(world)])
        for r, part in enumerate(parts):
            assert_all(part, r + 1)
        whole = empty(count * world)
        call(dist.all_to_all_single, whole, mine(count * world))
        for r, part in enumerate(whole.chunk(world) if count else []):
            assert_all(part, r + 1)
        parts = [empty() for _ in range(world)] if rank == 0 else None
        call(dist.gather, mine(), parts, dst=0)
        for r, part in enumerate(parts or []):
            assert_all(part, r + 1)
        part = empty()
        call(dist.scatter, part, [on_gpu(r, count) for r in range(world)] if rank == 1 else None, src=1)
        assert_all(part, rank)


@on_fake_gpus(2)
def test_every_type(rank, world):
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        tensor = on_gpu(rank + 1, 100, dtype)
        dist.all_reduce(tensor)
        assert_all(tensor, 3)
    tensor = torch.ones(5, dtype=torch.bool, device=GPU)
    dist.broadcast(tensor, 0)
    assert_all(tensor, True)


@MODES
@on_fake_gpus(2)
def test_tensors_that_are_not_contiguous(rank, world, asynchronous):
    tensor = torch.zeros(40, 6).to(GPU).t()
    tensor.fill_(rank + 1)
    finish(dist.all_reduce(tensor, async_op=asynchronous), asynchronous)
    assert_all(tensor, 3)
    columns = torch.zeros(world, 50).to(GPU).t()
    finish(dist.all_gather(list(columns.unbind(1)), on_gpu(rank, 50), async_op=asynchronous), asynchronous)
    assert torch.equal(columns.cpu(), torch.arange(world).float().expand(50, world))


@MODES
@on_fake_gpus(2)
def test_call_waits_for_the_stream_that_writes_its_input(rank, world, asynchronous):
    """The producer is late and the consumer follows immediately: the host waits for neither."""
    tensor = torch.empty(1000, device=GPU)
    slow_fill(tensor, rank + 1, 30)
    finish(dist.all_reduce(tensor, async_op=asynchronous), asynchronous)
    after = tensor * 2
    assert_all(after, 6)


@on_fake_gpus(2)
def test_the_caller_may_be_on_a_stream_of_its_own(rank, world):
    set_delays(3, 2000)
    side, other = torch.Stream(GPU), torch.Stream(GPU)
    with side:
        tensor = torch.empty(1000, device=GPU)
        slow_fill(tensor, rank + 1, 20)
        work = dist.all_reduce(tensor, async_op=True)
    with other:
        work.wait()  # on another stream than the call
        after = torch.empty_like(tensor)
        after.copy_(tensor, non_blocking=True)
    assert_all_on(other, after, 3)


def assert_all_on(stream, tensor, value):
    with stream:
        assert_all(tensor, value)


@on_fake_gpus(2)
def test_an_operation_does_not_wait_for_what_comes_later(rank, world):
    """Work enqueued after an asynchronous call delays neither its end nor the copies back."""
    tensor, later = on_gpu(rank + 1), torch.empty(10, device=GPU)
    work = dist.all_reduce(tensor, async_op=True)
    with held():
        later.fill_(7.0)
        side = torch.Stream(GPU)
        with side:
            work.wait()
            seen = torch.empty_like(tensor)
            seen.copy_(tensor, non_blocking=True)
            assert_all(seen, 3)
    assert_all(later, 7)


@on_fake_gpus(2)
def test_the_user_may_let_go_of_tensors_at_once(rank, world):
    set_delays(5, 1000)
    kept = []
    for round in range(20):
        work = dist.all_reduce(on_gpu(rank + round), async_op=True)
        dist.broadcast(on_gpu(round), src=0, async_op=True)  # no caller waits for it
        gathered = torch.empty(2000, device=GPU)
        dist.all_gather_into_tensor(gathered, on_gpu(rank + round), async_op=True).wait()
        kept.append(gathered)
        del work
    for round, gathered in enumerate(kept):
        assert_all(gathered[:1000], round)
        assert_all(gathered[1000:], round + 1)


@on_fake_gpus(2)
def test_outputs_are_kept_from_reuse_while_copies_into_them_are_on_their_way(rank, world):
    """Only copies on nvx's own stream need this: the caller's stream keeps its order by itself."""
    tensor = on_gpu(1)
    reset_counts()
    dist.all_reduce(tensor)
    assert counts()["data_recorded"] == 0
    dist.all_reduce(tensor, async_op=True).wait()
    assert counts()["data_recorded"] == 1


def counts_of_some_calls():
    tensor, output = on_gpu(1), torch.empty(2000, device=GPU)
    torch.accelerator.synchronize()
    reset_counts()
    for _ in range(5):
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(output, tensor, async_op=True).wait()
    return counts()


@on_fake_gpus(2)
def test_no_stream_is_waited_for_but_through_events(rank, world):
    seen = counts_of_some_calls()
    assert seen["stream_syncs"] == seen["device_syncs"] == seen["device_allocations"] == 0, seen


@on_fake_gpus(2)
def test_all_threads_call_the_device_of_the_tensors(rank, world):
    """On a thread without a device, CUDA would create a context on the first one."""
    set_delays(5, 2000)
    reset_counts()
    with torch.accelerator.device_index(1):
        tensor, large, got = (torch.ones(count, device=GPU) for count in (1000, 3_000_000, 1000))
        sums = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(large, async_op=True)]
        messages = [dist.isend(tensor.clone(), 1 - rank), dist.irecv(got, 1 - rank)]
        sums[0].get_future().then(lambda done: done.value()[0] + 1).wait()
        for work in sums + messages:
            work.wait()
        assert_all(large, 2)
    seen = counts()
    assert seen["event_records"] > 0 and seen["stray_calls"] == 0, seen


@on_fake_gpus(2, 3)
def test_messages(rank, world):
    set_delays(7, 500)
    after, before = (rank + 1) % world, (rank - 1) % world
    for count in COUNTS:
        output = torch.empty(count, device=GPU)
        sends = dist.isend(on_gpu(rank, count), after)
        dist.recv(output, before)
        assert_all(output, before)
        sends.wait()
        output = torch.empty(count, device=GPU)
        ops = [
            dist.P2POp(dist.irecv, output, before, tag=4),
            dist.P2POp(dist.isend, on_gpu(rank + 10, count), after, tag=4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_all(output, before + 10)


@on_fake_gpus(3)
def test_messages_from_any_source(rank, world):
    if rank != 0:
        dist.send(on_gpu(rank), 0)
        return
    sources = set()
    for _ in range(2):
        output = torch.empty(1000, device=GPU)
        source = dist.recv(output)
        sources.add(source)
        assert_all(output, source)
    assert sources == {1, 2}


@on_fake_gpus(2)
def test_a_receive_waits_for_the_readers_before_it(rank, world):
    """Work enqueued before the receive still reads the old contents."""
    if rank == 1:
        sync("reader has begun")
        dist.send(on_gpu(9), 0)
        return
    tensor, copy = on_gpu(5), torch.empty(1000, device=GPU)
    gate = torch.empty(1, device=GPU)
    slow_fill(gate, 1, 50)
    copy.copy_(tensor, non_blocking=True)
    work = dist.irecv(tensor, 1)
    sync("reader has begun")
    work.wait()
    assert_all(copy, 5)
    assert_all(tensor, 9)


@on_fake_gpus(2)
def test_futures(rank, world):
    set_delays(11, 1000)
    tensor = torch.empty(1000, device=GPU)
    slow_fill(tensor, rank + 1, 10)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert_all(doubled.wait(), 6)
    assert_all(future.wait()[0], 3)
    done = dist.all_reduce(tensor, async_op=True)
    done.wait()
    assert_all(done.get_future().wait()[0], 6)


@on_fake_gpus(2)
def test_coalescing(rank, world):
    tensors = [on_gpu(rank + i, 100 + i) for i in range(5)]
    with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for i, tensor in enumerate(tensors):
        assert_all(tensor, 2 * i + 1)


@on_fake_gpus(2)
def test_a_barrier_waits_for_the_current_stream(rank, world):
    for given in ({}, {"device_ids": [0]}, {"async_op": True}):
        tensor = on_gpu(0)
        slow_fill(tensor, 1, 30)
        work = dist.barrier(**given)
        if work:
            work.wait()
        assert torch.equal(peek(tensor), torch.ones(1000)), given


@only_nvx
@on_fake_gpus(2)
def test_a_barrier_refuses_indices_of_no_device(rank, world):
    opts = dist.BarrierOptions()
    for opts.device_ids in ([-1], [256]):
        with argument_error(f"device_ids must begin with the index of a device.* {opts.device_ids[0]}"):
            dist.group.WORLD._get_backend(on_gpu(0).device).barrier(opts)
    dist.barrier()


@only_nvx
@on_fake_gpus(2)
def test_a_barrier_in_place_of_gloos_waits_for_no_device(rank, world):
    c = importlib.import_module("nvx._C")
    made, opts, tensor = c.ProcessGroupNVX.Options(), dist.BarrierOptions(), on_gpu(0)
    made._barrier_on_host = True
    store = dist.PrefixStore("in place of gloo", dist.distributed_c10d._get_default_store())
    backend = c.ProcessGroupNVX(store, rank, world, made)
    torch.accelerator.synchronize()
    with held():
        tensor.fill_(1)
        for opts.asyncOp in (True, False):
            work = backend.barrier(opts)
            finish(work, opts.asyncOp)
        assert torch.equal(peek(tensor), torch.zeros(1000))
    with capture():
        backend.monitored_barrier(timedelta(seconds=20))
    opts.device_ids = [0]
    slow_fill(tensor, 2, 30)
    backend.barrier(opts)
    assert torch.equal(peek(tensor), torch.full((1000,), 2.0))
    backend.allreduce([on_gpu(1)], dist.AllreduceOptions()).wait()
    opts.device_ids = []
    slow_fill(tensor, 3, 30)
    backend.barrier(opts)
    assert torch.equal(peek(tensor), torch.full((1000,), 3.0)), "it has run a collective of a device"


@on_fake_gpus(2)
def test_groups_and_objects(rank, world):
    pair = dist.new_group([0, 1])
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, group=pair)
    assert_all(tensor, 3)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), 2.0)), "tensors of the CPU beside it"


@on_fake_gpus(2)
def test_tensors_of_the_cpu_have_an_order_of_their_own(rank, world):
    """CPU tensors have their own order, as with one backend per device type: a thread saves a checkpoint during
    training."""
    ends = []

    def save():
        for i in range(50):
            host = torch.full((10,), float(rank + i))
            dist.all_reduce(host)
            ends.append(torch.equal(host, torch.full((10,), 2.0 * i + 1)))
            time.sleep(0.0005 * rank)

    saver = threading.Thread(target=save)
    saver.start()
    for i in range(50):
        tensor = on_gpu(rank + i)
        dist.broadcast(tensor, i % 2)
        assert_all(tensor, i % 2 + i)
        finish(dist.all_reduce(tensor, async_op=i % 2 == 0), i % 2 == 0)
        assert_all(tensor, 2 * (i % 2 + i))
    saver.join()
    assert ends == [True] * 50


@on_fake_gpus(2)
def test_tensors_of_two_devices_are_refused(rank, world):
    second = torch.empty(10, device=f"{GPU}:1")
    with pytest.raises(ValueError, match="tensors must be on the same device"):
        dist.all_gather_into_tensor(torch.empty(20, device=f"{GPU}:0"), second)
    with pytest.raises(ValueError, match="tensors must be on the same device"):
        dist.all_gather([torch.empty(10), torch.empty(10)], on_gpu(1, 10))
    dist.all_reduce(second.fill_(rank))
    assert_all(second, 1)


@on_fake_gpus(2, op_timeout=2)
def test_a_stream_that_does_not_progress_is_named(rank, world):
    tensor = on_gpu(1)
    work = None
    with pytest.raises(dist.DistBackendError) as caught:
        if rank == 1:
            with held():
                work = dist.all_reduce(tensor, async_op=True)
                work.wait()
        else:
            dist.all_reduce(tensor)
    if rank == 1:
        assert "fakegpu:0 of rank 1" in str(caught.value)


@on_fake_gpus(2)
def test_a_failure_leaves_outputs_as_they_were(rank, world):
    tensor = on_gpu(rank + 5, 10 + rank)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(tensor)
    assert_all(tensor, rank + 5)


def train(device, rank, wrap):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3)).to(device)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(8, 20).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@on_fake_gpus(2)
def test_ddp(rank, world):
    def wrap(model):
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)

    for a, b in zip(train(GPU, rank, wrap), train("cpu", rank, wrap), strict=True):
        assert torch.equal(a, b), "the same bits as on the CPU"


@pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot report whether a stream is captured")
@MODES
@on_fake_gpus(2)
def test_a_capture_refuses_what_goes_through_host_memory(rank, world, asynchronous):
    tensor = on_gpu(rank + 1)
    dist.all_reduce(on_gpu(1))
    torch.accelerator.synchronize()
    reset_counts()
    mode = "thread_local"  # without a driver this process cannot decide whether other threads may query the device
    with captured(mode=mode), pytest.raises(ValueError, match="goes through host memory"):
        dist.all_reduce(tensor, async_op=asynchronous)
    refuse_in_a_capture(rank, mode)
    dist.all_reduce(tensor)
    assert_all(tensor, 3)


@pytest.mark.parametrize("count", [1000, 2_500_000])
@on_fake_gpus(2)
def test_calls_that_nobody_has_waited_for_follow_each_other(rank, world, count):
    """A call that reads the pending results of another runs after it, as on one stream."""
    set_delays(3, 1000)
    tensor, whole = on_gpu(rank + 1, count), torch.empty(2 * count, device=GPU)
    works = [dist.all_reduce(tensor[: count - 1], async_op=True)]
    works.append(dist.all_reduce(tensor, async_op=True))
    works.append(dist.all_gather_into_tensor(whole, tensor, async_op=True))
    dist.all_reduce(tensor)
    for work in works:
        work.wait()
    assert_all(tensor[: count - 1], 12)
    assert_all(tensor[count - 1 :], 6)
    assert_all(whole[: count - 1], 6)
    assert_all(whole[count:-1], 6)


# --- negative controls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, test, given",
    [
        (
            "event_waits",
            test_call_waits_for_the_stream_that_writes_its_input,
            {"asynchronous": True},
        ),  # used before ready
        ("current_stream", test_the_caller_may_be_on_a_stream_of_its_own, {}),  # on the wrong stream
    ],
    ids=["event_waits", "current_stream"],
)
def test_a_broken_rule_is_caught(fake_gpus, rule, test, given):
    assert_caught(fake_gpus, rule, test, "AssertionError: .* wanted, got", **given)
