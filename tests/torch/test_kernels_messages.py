"""Messages between GPUs of one host by copy engines: threads simulate the kernels on `fake_device`, and the
tests' libcuda copies."""

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_device import held, reset_counts, set_delays, slow_fill
from ranks import eventually, on_simulated_gpus, sync
from test_device import GPU, assert_all, on_gpu, refuse_in_a_capture
from test_pipeline import run_schedule
from test_pool import call_until_mapped, fake_cuda, grown, numbers, pooled

COUNTS = [1, 244, 245, 1000, 70_001, 3_000_017]  # 244 floats travel in the announcement


def open_devices():
    dist.all_reduce(on_gpu(1))
    torch.accelerator.synchronize()
    reset_counts()
    copied()


def copied():
    """The bytes that copies of more than an announcement's have moved in this process since the last call."""
    return fake_cuda().fake_copied()


@contextlib.contextmanager
def copies_held():
    """No copy of this process ends inside the block."""
    fake_cuda().fake_hold_copies(1)
    try:
        yield
    finally:
        fake_cuda().fake_hold_copies(0)


def default_store():
    """For after the default group's end."""
    return dist.distributed_c10d._get_default_store()


@on_simulated_gpus(2, 3)
def test_batches_in_both_directions(rank, world):
    """Every rank sends to every other one and receives, all at once."""
    open_devices()
    set_delays(rank, 500)
    for count in COUNTS:
        sent = {p: numbers(count, 10 * rank + p) for p in range(world) if p != rank}
        outputs = {p: on_gpu(-1.0, count) for p in sent}
        inputs = {p: tensor.to(GPU) for p, tensor in sent.items()}
        calls = [dist.P2POp(dist.isend, inputs[p], p) for p in sent]
        calls += [dist.P2POp(dist.irecv, outputs[p], p) for p in sent]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for p, output in outputs.items():
            assert torch.equal(output.cpu(), numbers(count, 10 * p + rank)), (count, p)
        assert copied() == (0 if count <= 244 else 2 * len(sent) * 4 * count)


@on_simulated_gpus(2)
def test_the_order_of_a_pair_and_tag_stays(rank, world):
    """Host memory and device memory on either side, small and large messages, and a receive from any rank."""
    open_devices()
    set_delays(rank, 500)
    kinds = [(GPU, GPU), (GPU, "cpu"), ("cpu", GPU), ("cpu", "cpu")]
    plan = [(kinds[i % 4], (100, 5000, 400_000)[i % 3], i % 2) for i in range(24)]
    if rank == 0:
        works = [
            dist.isend(torch.full((n,), float(i)).to(kind[0]), 1, tag=tag) for i, (kind, n, tag) in enumerate(plan)
        ]
        for work in works:
            work.wait()
    else:
        for wanted in (1, 0):
            for i, (kind, n, tag) in enumerate(plan):
                if tag != wanted:
                    continue
                tensor = torch.empty(n, device=kind[1])
                assert dist.recv(tensor, None if i % 5 == 0 else 0, tag=tag) == 0
                assert_all(tensor, float(i))


@on_simulated_gpus(2)
def test_a_tensor_is_written_when_its_stream_has_come_to_the_receive(rank, world):
    """A receive whose stream is late holds no other one up, and its tensor keeps what is still to be read."""
    open_devices()
    if rank == 0:
        works = [dist.isend(on_gpu(value, 100_000), 1, tag=value) for value in (1, 2)]
        for work in works:
            work.wait()
        return
    late, read = on_gpu(7, 100_000), on_gpu(0, 100_000)
    side = torch.Stream(GPU)
    torch.accelerator.synchronize()
    with held():
        read.copy_(late)
        works = [dist.irecv(late, 0, tag=1)]
        with side:
            other = torch.empty(100_000, device=GPU)
            dist.irecv(other, 0, tag=2).wait()
            assert_all(other, 2)
        assert not works[0].is_completed()
    works[0].wait()
    assert_all(late, 1)
    assert_all(read, 7)


@on_simulated_gpus(2)
def test_message_carries_the_data_of_a_slow_stream(rank, world):
    open_devices()
    for value in range(10):
        tensor = torch.empty(50_000, device=GPU)
        if rank == 0:
            slow_fill(tensor, value, 2)
            dist.isend(tensor, 1)
            del tensor
        else:
            dist.recv(tensor, 0)
            assert_all(tensor, value)


@on_simulated_gpus(2)
def test_tensors_of_the_pool_are_read_in_place(rank, world):
    """The receiver copies from the sender's tensor: nothing is copied to slots."""
    open_devices()
    grown()
    tensor = pooled(numbers(300_000, rank))
    call_until_mapped()
    torch.accelerator.synchronize()
    copied()
    output = on_gpu(0.0, 300_000)
    for _ in range(3):
        works = [dist.isend(tensor, 1 - rank), dist.irecv(output, 1 - rank)]
        for work in works:
            work.wait()
        assert torch.equal(output.cpu(), numbers(300_000, 1 - rank))
    assert copied() == 3 * 4 * 300_000


@on_simulated_gpus(3)
def test_slots_are_free_once_they_are_read(rank, world):
    """A few pairs take all slots that there are. Without slots the data goes through host memory."""
    open_devices()
    count = COUNTS[-1]
    tensor = on_gpu(rank, count)
    for _ in range(4):
        group = dist.new_group()
        dist.all_reduce(on_gpu(1), group=group)
        torch.accelerator.synchronize()
        for receiver in (1, 2):
            copied()
            if rank == 0:
                dist.send(tensor, receiver, group=group)
            elif rank == receiver:
                dist.recv(tensor, 0, group=group)
                assert_all(tensor, 0)
                assert copied() == 4 * count


@on_simulated_gpus(2)
def test_a_receive_from_host_memory_outlives_the_timeout_of_its_stream(rank, world):
    """It has all its data: only the copy to the device waits for the stream."""
    open_devices()
    if rank == 0:
        works = [dist.isend(torch.full((100_000,), 5.0 + i), 1) for i in range(2)]
        sync("announced")
        for work in works:
            work.wait()
    else:
        sync("announced")
        backend = dist.group.WORLD._get_backend(torch.device(GPU))
        outputs = [on_gpu(0, 100_000), on_gpu(0, 100_000)]
        torch.accelerator.synchronize()
        backend._set_default_timeout(timedelta(seconds=4))
        with held():
            works = [dist.irecv(output.fill_(1), 0) for output in outputs]
            works[0].wait()
            time.sleep(4.5)
        backend._set_default_timeout(timedelta(seconds=30))
        works[1].wait()
        assert_all(outputs[0], 5)
        assert_all(outputs[1], 6)
    sum_ = on_gpu(1)
    dist.all_reduce(sum_)
    assert_all(sum_, 2)


@on_simulated_gpus(2)
def test_a_receive_of_a_group_that_closes_waits_for_its_stream(rank, world):
    """Its tensor keeps what earlier work of the stream has to read, while the group waits for its lane."""
    open_devices()
    store = default_store()
    late, read = on_gpu(7, 100_000), on_gpu(0, 100_000)
    torch.accelerator.synchronize()
    if rank == 0:
        dist.isend(on_gpu(1, 100_000), 1)
        store.wait(["left"])
        return
    with held():
        read.copy_(late)
        dist.irecv(late, 0)
        dist.all_reduce(torch.ones(1), async_op=True)  # rank 0 never comes
        dist.destroy_process_group()
        store.set("left", "")
    torch.accelerator.synchronize()
    assert_all(read, 7)


@on_simulated_gpus(2)
def test_a_message_arrives_after_its_sender_has_left(rank, world):
    open_devices()
    store = default_store()
    if rank == 0:
        dist.send(on_gpu(3, 100_000), 1)
        dist.destroy_process_group()
        store.set("left", "")
        return
    output = on_gpu(0, 100_000)
    torch.accelerator.synchronize()
    with copies_held():
        work = dist.irecv(output, 0)
        store.wait(["left"])
        time.sleep(0.5)  # several checks of the peer
        assert not work.is_completed()
    work.wait()
    assert_all(output, 3)


@on_simulated_gpus(2)
def test_a_receive_fails_if_its_sender_leaves_while_its_tensor_is_read(rank, world):
    """The sender may have reused the tensor."""
    open_devices()
    store = default_store()
    grown()
    tensor = pooled(numbers(100_000, rank))
    call_until_mapped()
    torch.accelerator.synchronize()
    if rank == 0:
        dist.isend(tensor, 1)
        store.wait(["read"])
        dist.destroy_process_group()
        store.set("left", "")
        return
    output = on_gpu(0, 100_000)
    torch.accelerator.synchronize()
    copied()
    with copies_held():
        work = dist.irecv(output, 0)
        eventually(copied)
        store.set("read", "")
        store.wait(["left"])
    with pytest.raises(dist.DistBackendError, match="rank 0.* has (left|destroyed)"):
        work.wait()


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
@on_simulated_gpus(2)
def test_pipelines(rank, world, name):
    open_devices()
    run_schedule(name, rank, world, 1 if name == "1F1B" else 2, device=GPU, width=128)
    assert copied() > 0


@on_simulated_gpus(2)
def test_a_message_without_a_receive_ends_at_the_timeout(rank, world):
    """No stream waits for it."""
    open_devices()
    dist.group.WORLD._get_backend(torch.device(GPU))._set_default_timeout(timedelta(seconds=2))
    tensor = on_gpu(3, 100_000)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.isend(tensor, 1).wait()
    tensor.add_(1)
    assert_all(tensor, 4)
    sync("both have looked")


@on_simulated_gpus(2)
def test_an_abort_ends_messages_that_wait_for_the_peer(rank, world):
    open_devices()
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    mine, theirs = on_gpu(1, 100_000), on_gpu(2, 100_000)
    works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank, tag=1)]
    sync("both have called")
    threading.Timer(0.2, backend.abort).start()
    for work in works:
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()
    assert_all(mine.add_(theirs), 3)


@on_simulated_gpus(2, op_timeout=20)
def test_a_driver_that_refuses_copies_fails_the_group(rank, world):
    open_devices()
    if rank == 0:
        fake_cuda().fake_refuse(b"cuMemcpyAsync")
    tensor = on_gpu(rank, 100_000)
    try:
        with pytest.raises(dist.DistBackendError, match="could not be copied between GPUs"):
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    finally:
        fake_cuda().fake_refuse(b"")


@on_simulated_gpus(2)
def test_captures_refuse_messages(rank, world):
    open_devices()
    refuse_in_a_capture(rank)
