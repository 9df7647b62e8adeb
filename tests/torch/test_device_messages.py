"""Messages of device tensors: a message blocks only later messages of the same pair and tag while it waits for its
stream."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from fake_device import held, records_fail, set_delays, slow_fill
from ranks import on_fake_gpus, only_nvx, sync
from test_device import GPU, assert_all, on_gpu

pytestmark = only_nvx


def received(source, tag=0, count=1000, device=GPU):
    tensor = torch.empty(count, device=device)
    dist.recv(tensor, source, tag=tag)
    return tensor.cpu()


@on_fake_gpus(3)
def test_a_message_whose_stream_is_late_holds_nothing_up(rank, world):
    """Neither other messages (to the same rank too), nor collectives, nor the sender wait for it."""
    dist.all_reduce(on_gpu(1))
    if rank == 0:
        late, host = on_gpu(7), torch.full((10,), 3.0)
        side = torch.Stream(GPU)
        with side:
            other, more = on_gpu(8), on_gpu(9, 100_000)
            total = on_gpu(1)
        torch.accelerator.synchronize()
        with held():
            waits = dist.isend(late, 1)
            with side:
                dist.isend(other, 1, tag=1).wait()
                dist.isend(more, 2).wait()
                dist.isend(host, 1, tag=2).wait()
                dist.all_reduce(total, async_op=True).wait()
                assert_all(total, 3)
                got = torch.empty(1000, device=GPU)
                dist.irecv(got, 2).wait()
                assert_all(got, 5)
            assert not waits.is_completed()
            sync("all but one have arrived")
        waits.wait()
    elif rank == 1:
        first = torch.empty(1000, device=GPU)
        work = dist.irecv(first, 0)
        assert_all(received(0, tag=1), 8)
        assert_all(received(0, tag=2, count=10, device="cpu"), 3)
        dist.all_reduce(on_gpu(1))
        assert not work.is_completed()
        sync("all but one have arrived")
        work.wait()
        assert_all(first, 7)
    else:
        assert_all(received(0, count=100_000), 9)
        dist.all_reduce(on_gpu(1))
        dist.send(on_gpu(5), 0)
        sync("all but one have arrived")


@on_fake_gpus(2)
def test_the_order_of_a_pair_and_tag_stays(rank, world):
    """The order holds if the first message is late and a message of a CPU tensor follows it."""
    set_delays(rank, 500)
    for count in (10, 200_000):
        if rank == 0:
            side = torch.Stream(GPU)
            with side:
                second = on_gpu(2, count)
            host = torch.full((count,), 3.0)
            first = on_gpu(1, count)
            torch.accelerator.synchronize()
            with held():
                works = [dist.isend(first, 1)]
                with side:
                    works.append(dist.isend(second, 1))
                works.append(dist.isend(host, 1))
                time.sleep(0.05)
            for work in reversed(works):
                work.wait()
        else:
            assert [received(0, count=count)[0].item() for _ in range(3)] == [1, 2, 3]


@on_fake_gpus(2)
def test_many_messages_from_many_streams(rank, world):
    set_delays(rank, 1000)
    streams = [torch.Stream(GPU) for _ in range(4)]
    works, outputs = [], []
    for i in range(60):
        with streams[i % 4]:
            tensor = torch.empty(100 if i % 5 else 70_000, device=GPU)
            slow_fill(tensor, rank * 100 + i, 0.2 * (i % 3))
            works.append(dist.isend(tensor, 1 - rank, tag=i % 3))
            outputs.append(torch.empty_like(tensor))
            works.append(dist.irecv(outputs[-1], 1 - rank, tag=i % 3))
    for work in works:
        work.wait()
    for i, output in enumerate(outputs):
        assert_all(output, (1 - rank) * 100 + i)


@on_fake_gpus(2)
def test_send_that_is_not_waited_for_arrives(rank, world):
    if rank == 0:
        for value in range(20):
            tensor = torch.empty(1000, device=GPU)
            slow_fill(tensor, value, 2)
            dist.isend(tensor, 1)
            del tensor
    else:
        for value in range(20):
            assert_all(received(0), value)
    sync("received")  # a group that is destroyed waits for its sends for 0.3 s only


@on_fake_gpus(2)
def test_a_callback_may_wait_for_the_next_message(rank, world):
    """The thread that completes one message is not the only thread that polls the others."""
    if rank == 0:
        first, second = on_gpu(1), torch.empty(1000, device=GPU)
        with held():
            sent = dist.isend(first, 1)
            answer = torch.empty(1000, device=GPU)
            answered = dist.irecv(answer, 1)
            slow_fill(second, 2, 20)
            dist.isend(second, 1)  # no caller waits for it on this rank

            def wait_for_the_answer(_):
                answered.wait()
                return [answer]

            then = sent.get_future().then(wait_for_the_answer)
        assert_all(then.wait()[0], 9)
    else:
        assert_all(received(0), 1)
        assert_all(received(0), 2)
        dist.send(on_gpu(9), 0)


@on_fake_gpus(2, op_timeout=2)
def test_a_stream_that_does_not_progress_is_named(rank, world):
    if rank == 0:
        tensor = on_gpu(1)
        with held():
            work = dist.isend(tensor, 1)
            with pytest.raises(dist.DistBackendError, match="fakegpu:0 of rank 0.*has not finished within"):
                work.wait()
    else:
        with pytest.raises(dist.DistBackendError):
            received(0)


@on_fake_gpus(2)
def test_an_abort_ends_a_message_that_waits_for_its_stream(rank, world):
    tensor = on_gpu(1)
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    with held():
        work = dist.isend(tensor, 1 - rank)
        threading.Timer(0.2, backend.abort).start()
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()


@on_fake_gpus(2)
def test_a_future_completes_on_a_device_that_records_no_events(rank, world):
    tensor, called = on_gpu(1, 1 << 20), threading.Event()
    torch.accelerator.synchronize()
    if rank == 0:
        future = dist.isend(tensor, 1).get_future()
        future.then(lambda f: called.set())
        time.sleep(0.5)  # its data has reached the host by then
        with records_fail():
            sync("the device refuses")
            assert called.wait(20)
        with pytest.raises(dist.DistBackendError, match="the future of send.*an illegal memory access"):
            future.wait()
    else:
        sync("the device refuses")
        assert_all(received(0, count=1 << 20), 1)
    sync("over")


@on_fake_gpus(2)
def test_destroying_a_group_while_a_message_waits_for_its_stream(rank, world):
    """The group ends promptly, and the message fails."""
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=pair)
    tensor = on_gpu(1)
    began = time.monotonic()
    with held():
        work = dist.isend(tensor, group=pair, group_dst=1 - rank)
        dist.destroy_process_group(pair)
        with pytest.raises((dist.DistBackendError, ValueError), match="destroyed"):
            work.wait()
    assert time.monotonic() - began < 10
    dist.barrier()
