"""Messages of device tensors that NVX_DELEGATE gives to NCCL, here to `fake_nccl`: matched by order, not by tag."""

import os
import signal
import time

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from fake_device import held
from ranks import SEVERAL_HOSTS, sync
from test_delegate import LARGE, SMALL, is_delegated, on_nccl_gpus, on_simulated_nccl_gpus, raises_before_long
from test_device import GPU, assert_all, on_gpu


def ready():
    """The ranks connect: the first message would do this, too."""
    dist.broadcast(on_gpu(1), 0)
    torch.accelerator.synchronize()


def batch(*ops):
    return dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, tag=tag) for call, tensor, peer, tag in ops])


@on_nccl_gpus(2)
def test_messages_of_its_size_go_to_nccl(rank, world):
    ready()
    call = (lambda tensor: dist.send(tensor, 1, tag=5)) if rank == 0 else (lambda tensor: dist.recv(tensor, 0, tag=5))
    for count, by_nccl in ((LARGE, True), (SMALL, False), (0, False)):
        tensor = on_gpu(rank, count)
        assert is_delegated(lambda tensor=tensor: call(tensor)) == by_nccl
        assert_all(tensor, 0)


@on_nccl_gpus(3)
def test_the_first_message_connects_all_ranks(rank, world):
    """As the first batch of a NCCL group does: so every rank has one."""
    tensor = torch.empty(LARGE, device=GPU)
    batch((dist.isend, on_gpu(rank, LARGE), (rank + 1) % 3, 0), (dist.irecv, tensor, (rank + 2) % 3, 0))[0].wait()
    assert_all(tensor, (rank + 2) % 3)
    assert fake_nccl.calls() == {"connect": 1, "send": 1, "recv": 1, "batch": 1}


@on_nccl_gpus(2)
def test_a_batch_is_one_call_and_its_tags_match(rank, world):
    """Both ways at once, small messages among them, in other orders on the two ranks."""
    ready()
    peer, sizes = 1 - rank, (LARGE, 3 * LARGE, SMALL, 2 * LARGE, LARGE)
    sent = [(dist.isend, on_gpu(10 * rank + tag, n), peer, tag) for tag, n in enumerate(sizes)]
    got = [torch.empty(n, device=GPU) for n in sizes]
    received = [(dist.irecv, tensor, peer, tag) for tag, tensor in enumerate(got)]
    ops = sent + received if rank == 0 else received[::-1] + sent[::-1]
    for work in batch(*ops):
        work.wait()
    for tag, tensor in enumerate(got):
        assert_all(tensor, 10 * peer + tag)
    calls = fake_nccl.calls()
    assert (calls["batch"], calls["send"], calls["recv"]) == (1, 4, 4)


@on_nccl_gpus(2)
def test_the_host_runs_ahead_and_streams_wait(rank, world):
    ready()
    tensor = on_gpu(7 + rank, LARGE)
    torch.accelerator.synchronize()
    with held():
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        work.wait()
        assert not work.is_completed()
    assert_all(tensor, 7)
    assert work.is_completed()


@on_nccl_gpus(2)
def test_order_with_collectives_and_calls_through_host_memory(rank, world):
    ready()
    tensor = on_gpu(rank + 1, LARGE)
    for _ in range(5):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)  # by NCCL
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        dist.all_reduce(tensor[:SMALL], op=dist.ReduceOp.AVG)  # through host memory
        work.wait()
        tensor.add_(1)
    assert_all(tensor, 6.5)


@on_nccl_gpus(2)
def test_a_small_message_whose_stream_is_late_stays_first(rank, world):
    """Both have one tag; the large one is announced through the mailbox, too."""
    ready()
    if rank == 1:
        small, large = torch.empty(SMALL, device=GPU), torch.empty(LARGE, device=GPU)
        works = [dist.irecv(small, 0), dist.irecv(large, 0)]
    else:
        small, large, side = on_gpu(1, SMALL), on_gpu(2, LARGE), torch.Stream(GPU)
        torch.accelerator.synchronize()
        with held():
            works = [dist.isend(small, 1)]
            with side:
                works.append(dist.isend(large, 1))
            time.sleep(0.2)
    for work in works:
        work.wait()
    assert_all(small, 1)
    assert_all(large, 2)


def pipeline(rank, world):
    """Four microbatches through all ranks and back, as a pipeline's stages exchange them."""
    ready()
    for i in range(4):
        x = on_gpu(i, LARGE) if rank == 0 else torch.empty(LARGE, device=GPU)
        if rank > 0:
            batch((dist.irecv, x, rank - 1, 0))[0].wait()
        x = x + rank
        grad = torch.empty(LARGE, device=GPU) if rank < world - 1 else x.clone()
        if rank < world - 1:
            batch((dist.isend, x, rank + 1, 0), (dist.irecv, grad, rank + 1, 1))[0].wait()
        if rank > 0:
            batch((dist.isend, grad, rank - 1, 1))[0].wait()
        assert_all(grad, i + sum(range(world)))


test_a_pipeline = on_nccl_gpus(3)(pipeline)
test_a_pipeline_beside_kernels = on_simulated_nccl_gpus(3)(pipeline)


@on_nccl_gpus(2)
def test_any_source_is_refused(rank, world):
    ready()
    with pytest.raises(ValueError, match="NCCL has no receive from any source"):
        dist.recv(torch.empty(LARGE, device=GPU))
    if rank == 0:
        dist.send(on_gpu(3, SMALL), 1)
    else:
        tensor = torch.empty(SMALL, device=GPU)
        assert dist.recv(tensor) == 0
        assert_all(tensor, 3)


@on_nccl_gpus(2)
def test_a_message_of_a_batch_begins_at_its_end(rank, world):
    ready()
    tensor = on_gpu(rank, LARGE)
    with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as manager:
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        assert not work.is_completed()
        with pytest.raises(ValueError, match="begins when the batch is complete"):
            work.wait()
    manager.wait()
    assert_all(tensor, 0)


@on_nccl_gpus(2)
def test_messages_of_a_pair_in_another_order_are_named(rank, world):
    """NCCL would give each receive the other's data."""
    ready()
    message = "send/recv mismatch in group .*message 2 of this pair that NVX_DELEGATE gives to NCCL.*as message 1"
    if rank == 0:
        for tag in (0, 1):
            dist.isend(on_gpu(tag, LARGE), 1, tag=tag)
        raises_before_long(message, lambda: dist.send(on_gpu(2, LARGE), 1))  # its sends may have ended well
    else:
        works = [dist.irecv(on_gpu(0, LARGE), 0, tag=tag) for tag in (1, 0)]
        raises_before_long(message, lambda: [work.wait() for work in works])
    torch.accelerator.synchronize()


def one_end(rank, receives):
    """Rank 1 receives by another way than the one by which rank 0 sends."""
    ready()
    message = "take send_recv out of NVX_DELEGATE"
    if rank == 0:
        raises_before_long(message, dist.isend(on_gpu(1, LARGE), 1).wait)
    else:
        with pytest.raises(dist.DistBackendError, match=message):
            receives()
    torch.accelerator.synchronize()


@on_nccl_gpus(2)
def test_a_receive_on_the_cpu_of_a_delegated_send_is_named(rank, world):
    one_end(rank, lambda: dist.recv(torch.empty(LARGE), 0))


@on_nccl_gpus(2)
def test_a_receive_of_another_size_is_named(rank, world):
    one_end(rank, lambda: dist.recv(torch.empty(SMALL, device=GPU), 0))


def late(call):
    ready()
    work = call(on_gpu(1, LARGE), 1, tag=4)
    raises_before_long(r"timed out in (send|recv)\(f32, 512 elements, (to|from) rank 1, tag 4\)", work.wait)
    torch.accelerator.synchronize()
    sync("named")


@on_nccl_gpus(2, op_timeout=2)
def test_a_sender_that_does_not_come_is_named(rank, world):
    late(dist.irecv) if rank == 0 else (ready(), sync("named"))


@on_nccl_gpus(2, op_timeout=2)
def test_a_receiver_that_does_not_come_is_named(rank, world):
    late(dist.isend) if rank == 0 else (ready(), sync("named"))


@pytest.mark.skipif(SEVERAL_HOSTS, reason="a sender to another host notices it at the timeout")
@on_nccl_gpus(2, dies=[1])
def test_a_send_to_a_rank_that_is_killed_ends(rank, world):
    ready()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    raises_before_long("rank 1", dist.isend(on_gpu(1, LARGE), 1).wait)
    torch.accelerator.synchronize()
