"""Groups of ranks with device tensors: splits, sparse tensors, abort of the set-up, completion hooks."""

import concurrent.futures
import contextlib
import threading
import time
from datetime import timedelta

import nvx
import pytest
import torch
import torch.distributed as dist
from fake_device import peek, queries_fail, set_copy_rate, set_delays
from ranks import on_fake_gpus, only_nvx, sync
from test_delegate import raises_before_long
from test_device import GPU, assert_all, on_gpu
from test_groups import split
from test_interrupts import handled

pytestmark = only_nvx


def split_sum(group, tensor):
    group.allreduce([tensor]).wait()
    return tensor


@on_fake_gpus(4)
def test_splits(rank, world):
    """Each split orders its own calls, for device tensors too; the parent group stays usable."""
    set_delays(rank, 500)
    halves = split([[0, 1], [2, 3]], "halves", torch.device(GPU))
    pairs = split([[0, 2], [1, 3]], "pairs", torch.device(GPU))
    for count in (100, 1_500_000):
        works = [group.allreduce([on_gpu(rank, count)]) for group in (halves, pairs)]
        total = on_gpu(rank, count)
        dist.all_reduce(total)
        assert_all(total, 6)
        for work, group_sum in zip(works, ([1, 5][rank // 2], [2, 4][rank % 2]), strict=True):
            work.wait()
            assert_all(work.result()[0], group_sum)
        assert_all(split_sum(halves, torch.full((3,), float(rank))), [1, 5][rank // 2])


@on_fake_gpus(3)
def test_a_group_shrinks(rank, world):
    """torch gives the smaller group only tensors of the device to which the group is bound."""
    trio = dist.new_group([0, 1, 2], device_id=torch.device(GPU, 0))
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, group=trio)
    assert_all(tensor, 6)
    if rank < 2:
        smaller = dist.shrink_group([2], group=trio)
        for count in (100, 1_500_000):
            tensor = on_gpu(rank + 1, count)
            dist.all_reduce(tensor, group=smaller)
            assert_all(tensor, 3)
    dist.barrier()


def sparse(rank):
    """Rows that overlap those of other ranks; later ranks have more rows, some of them twice."""
    rows = torch.arange(2 * rank + 1) * (rank + 1)
    values = torch.arange(3.0 * 2 * rows.numel()).view(-1, 3) + rank
    return torch.sparse_coo_tensor(torch.cat([rows, rows]).unsqueeze(0), values, (50, 3), check_invariants=True)


def reduce_sparse(tensor, asynchronous=False):
    """Calls the bare backend: torch's operator takes sparse tensors of the CPU and of CUDA only."""
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    device_backend().allreduce([tensor], options).wait()


@pytest.mark.parametrize("asynchronous", [False, True])
@on_fake_gpus(2, 3)
def test_sparse_all_reduce(rank, world, asynchronous):
    """Also reduces data that the stream has yet to write; the call is synchronous."""
    set_delays(rank, 2000)
    want = sum(sparse(r).to_dense() for r in range(world))
    tensor = sparse(rank).to(GPU)
    assert tensor.device.type == GPU and tensor.is_sparse
    for times in (1, world):
        reduce_sparse(tensor, asynchronous)
        assert tensor.device.type == GPU and tensor.is_sparse
        assert torch.equal(tensor.cpu().to_dense(), want * times)


@on_fake_gpus(2)
def test_a_sparse_all_reduce_beside_others(rank, world):
    """Sparse collectives share the order of those of CPU tensors."""
    set_delays(rank, 500)
    before, after = on_gpu(rank, 2_000_000), torch.full((5,), float(rank))
    work = dist.all_reduce(before, async_op=True)
    tensor = sparse(rank).to(GPU)
    reduce_sparse(tensor)
    dist.all_reduce(after)
    assert_all(after, 1)
    work.wait()
    assert_all(before, 1)
    assert torch.equal(tensor.cpu().to_dense(), sum(sparse(r).to_dense() for r in range(world)))


def device_backend():
    return dist.group.WORLD._get_backend(torch.device(GPU))


@on_fake_gpus(2, op_timeout=60)
def test_an_abort_ends_the_set_up_of_the_devices_group(rank, world):
    """The first collective of device tensors needs all ranks, and the other ranks may never come."""
    if rank == 0:
        tensor, begin = on_gpu(1), time.monotonic()
        threading.Timer(0.3, device_backend().abort).start()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(tensor)
        assert time.monotonic() - begin < 30
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(tensor)
        assert_all(tensor, 1)
        sync("aborted")
        return
    sync("aborted")
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(on_gpu(1))


@on_fake_gpus(2)
def test_a_handler_that_calls_into_the_set_up_of_a_device_gets_an_error(rank, world):
    """The first collective of device tensors waits for the other ranks, and runs signal handlers meanwhile."""
    store, tensor, refused = dist.distributed_c10d._get_default_store(), on_gpu(rank + 1), []

    def handler():
        with pytest.raises(nvx.ArgumentError, match="re-entrant call") as raised:
            dist.all_reduce(on_gpu(1))
        refused.append(raised)
        store.set("refused", "1")

    if rank == 0:
        handled(lambda: dist.all_reduce(tensor), handler, delay=1)
        assert len(refused) == 1
    else:
        store.wait(["refused"], timedelta(seconds=20))
        dist.all_reduce(tensor)
    assert_all(tensor, 3)


@on_fake_gpus(2)
def test_a_timeout_set_during_the_set_up_of_a_device_counts(rank, world):
    tensor = on_gpu(1)
    if rank == 0:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(dist.broadcast, tensor, 1)
            time.sleep(0.5)  # the set-up has begun by then, and waits for the other rank
            nvx.set_timeout(timedelta(seconds=2))
            sync("set")
            first.result(60)
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            dist.broadcast(tensor, 1)
        assert time.monotonic() - started < 10
    else:
        sync("set")
        dist.broadcast(tensor, 1)
    sync("over")


def listen(group, hook):
    # torch registers hooks only with the default backend.
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_on_completion_hook(hook)


def ended(group, call, tensor):
    """The tensor's contents when a hook runs at the end of the call, and the call's duration."""
    seen = []
    reported = threading.Event()

    def hook(info):
        seen.append((peek(tensor)[-1].item(), info.active_duration.total_seconds()))
        reported.set()

    listen(group, hook)
    work = call()
    if work is not None:
        work.wait()
    assert reported.wait(20)
    return work, seen[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@on_fake_gpus(2)
def test_a_device_that_does_not_report_the_end_fails_the_group(rank, world, asynchronous):
    """A hook makes nvx poll events. A failed poll must not terminate the call that polls, nor the thread."""
    group, reported = dist.new_group(), threading.Event()
    group._enable_collectives_timing()
    tensor = on_gpu(1)
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    if rank == 0:
        listen(group, lambda info: reported.set())
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(dist.all_reduce, tensor, group=group, async_op=asynchronous)
            time.sleep(0.3)  # its input has reached the host by then; otherwise it fails sooner, with the same text
            with queries_fail():
                sync("the device reports nothing")
                call.result(60)
                assert reported.wait(20)
        words = "all_reduce of group.* failed on the device: .*an illegal memory access"
    else:
        sync("the device reports nothing")
        # Its part may or may not be done before the failure is reported.
        with contextlib.suppress(dist.DistBackendError):
            dist.all_reduce(tensor, group=group)
        words = "an illegal memory access.*reported by rank 0"
    raises_before_long(words, lambda: dist.all_reduce(tensor, group=group))
    torch.accelerator.synchronize()


@on_fake_gpus(2)
def test_a_window_raises_what_its_device_did_not_report(rank, world):
    """The group of its message to a CPU tensor goes on."""
    tensor, message = on_gpu(1), torch.ones(4)
    dist.broadcast(tensor, 1)
    torch.accelerator.synchronize()
    if rank == 0:
        dist.group.WORLD._start_coalescing(tensor.device)
        first = dist.broadcast(tensor, 1, async_op=True)
        dist.irecv(message, 1)
        window = dist.group.WORLD._end_coalescing(tensor.device)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(window.wait)
            time.sleep(0.5)  # it waits for the message by then
            with queries_fail():
                assert first.is_completed()
            sync("the device reports nothing")
            with pytest.raises(dist.DistBackendError, match="broadcast of group.* failed on the device"):
                waits.result(60)
    else:
        dist.broadcast(tensor, 1)
        sync("the device reports nothing")
        dist.send(message, 0)
    sync("over")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [1000, 2_500_000])
@on_fake_gpus(2)
def test_hooks_and_durations_at_the_end(rank, world, count, asynchronous):
    """The end is the arrival of the results on the device, not the start of the copy."""
    group = dist.new_group()
    group._enable_collectives_timing()
    dist.all_reduce(on_gpu(1), group=group)
    tensor = on_gpu(rank + 1, count)
    torch.accelerator.synchronize()
    set_copy_rate(count * 4 / 0.4)
    try:
        work, (value, span) = ended(group, lambda: dist.all_reduce(tensor, group=group, async_op=asynchronous), tensor)
        assert value == 3
        least = 0.75 if count == 1000 else 0.5  # downloads of chunks overlap uploads of others
        assert span > least
        if asynchronous:
            assert work._get_duration() > 1000 * least
            assert work.is_completed()
    finally:
        set_copy_rate(0)


@on_fake_gpus(2)
def test_a_hook_runs_for_a_window_when_all_of_it_has_arrived(rank, world):
    group, reported = dist.new_group(), []
    group._enable_collectives_timing()
    tensors = [on_gpu(rank + 1) for _ in range(3)]
    dist.all_reduce(on_gpu(1), group=group)
    torch.accelerator.synchronize()
    listen(group, lambda info: reported.append((info.op_type, [peek(tensor)[-1].item() for tensor in tensors])))
    set_copy_rate(4000 / 0.2)
    try:
        with dist._coalescing_manager(group, tensors[0].device, async_ops=True) as window:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        window.wait()
        end = time.monotonic() + 20
        while not any("COALESCED" in str(op) for op, _ in reported):
            assert time.monotonic() < end, reported
            time.sleep(0.005)
    finally:
        set_copy_rate(0)
    assert all(seen == [3, 3, 3] for op, seen in reported if "COALESCED" in str(op)), reported


@on_fake_gpus(2)
def test_a_hook_gets_no_operation_from_before_its_registration(rank, world):
    """This holds even if another listener, such as the recorder of torch 2.15, is called for earlier calls."""
    group, tensor, reported = dist.new_group(), on_gpu(1), []
    torch.accelerator.synchronize()
    set_copy_rate(4000 / 0.2)
    try:
        dist.all_reduce(tensor, group=group, async_op=True)
        listen(group, reported.append)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        end = time.monotonic() + 20
        while not reported or reported[-1].seq != 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert [info.seq for info in reported] == [2]
    finally:
        set_copy_rate(0)


@on_fake_gpus(2)
def test_a_hook_runs_for_a_message_when_it_has_arrived(rank, world):
    group = dist.new_group()
    if rank == 1:
        dist.send(on_gpu(5), group=group, group_dst=0)
        return
    tensor = on_gpu(0)
    torch.accelerator.synchronize()
    set_copy_rate(4000 / 0.2)
    try:
        _, (value, _) = ended(group, lambda: dist.irecv(tensor, group=group, group_src=1), tensor)
        assert value == 5
    finally:
        set_copy_rate(0)
