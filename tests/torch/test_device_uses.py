"""Training with accelerator tensors gives the same bits as training with CPU tensors."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import nvx
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from fake_device import counts, held, peek, reset_counts, set_delays, slow_fill
from ranks import TORCH, eventually, on_fake_gpus
from test_device import GPU, assert_all, on_gpu
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from training import WIDTH, assert_same_weights, batch


class Net(nn.Module):
    """Layers with the same bits on both: the device uses the kernels of the CPU, except for its fused ones."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(WIDTH, 37)
        self.second = nn.Linear(37, 19)
        self.last = nn.Linear(19, 5, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def train(device, rank, wrap, backward=lambda model, step, loss: loss.backward()):
    model = wrap(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = (t.to(device) for t in batch(rank, step))
        backward(model, step, (model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


def host(model):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()]


def same_as_on_cpu(rank, wrap, **named):
    set_delays(rank, 200)
    assert_same_weights(host(train(GPU, rank, wrap, **named)), host(train("cpu", rank, wrap, **named)), "on the CPU")


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
@on_fake_gpus(2)
def test_ddp(rank, world, options):
    same_as_on_cpu(rank, lambda model: DDP(model, bucket_cap_mb=0.001, **options))


@on_fake_gpus(2)
def test_ddp_with_a_hook(rank, world):
    def wrap(model):
        model = DDP(model, bucket_cap_mb=0.001)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model

    same_as_on_cpu(rank, wrap)


@on_fake_gpus(2)
def test_ddp_without_sync(rank, world):
    def backward(model, step, loss):
        if step % 2:
            loss.backward()
            return
        with model.no_sync():
            loss.backward()

    same_as_on_cpu(rank, lambda model: DDP(model, bucket_cap_mb=0.001), backward=backward)


def sharded(model):
    device = next(model.parameters()).device.type
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@on_fake_gpus(2, 3)
def test_fsdp2(rank, world):
    same_as_on_cpu(rank, sharded)


@on_fake_gpus(4)
def test_fsdp2_hybrid(rank, world):
    def wrap(model):
        device = next(model.parameters()).device.type
        return fully_shard(model, mesh=dist.init_device_mesh(device, (2, 2), mesh_dim_names=("outer", "inner")))

    same_as_on_cpu(rank, wrap)


@on_fake_gpus(2, 3)
def test_dtensors(rank, world):
    set_delays(rank, 500)
    mesh = dist.init_device_mesh(GPU, (world,))
    whole = torch.arange(7 * 5.0).view(7, 5)
    for start in (Shard(0), Shard(1), Replicate()):
        for end in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole.to(GPU), mesh, [start]).redistribute(mesh, [end])
            assert torch.equal(moved.full_tensor().cpu(), whole), (start, end)
    for end in (Shard(0), Replicate()):
        parts = dist.tensor.DTensor.from_local(whole.to(GPU), mesh, [Partial()]).redistribute(mesh, [end])
        assert torch.equal(parts.full_tensor().cpu(), whole * world), end


def pipeline(device, rank, world, name):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()).to(device) for _ in range(world)]
    x, y = torch.randn(16, 12), torch.randn(16, 12)
    stage = pipelining.PipelineStage(parts[rank], rank, world, torch.device(device))
    schedule = getattr(pipelining, f"Schedule{name}")(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    given = (x.to(device),) if rank == 0 else ()
    schedule.step(*given, **({"target": y.to(device)} if rank == world - 1 else {}))
    return [p.grad.cpu() for p in parts[rank].parameters()]


# torch 2.12 saves the state of CUDA's generator, whatever the device of the stage.
@pytest.mark.skipif(TORCH == (2, 12), reason="this torch takes the stages' device for a GPU of CUDA")
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@on_fake_gpus(2, 3)
def test_pipelines(rank, world, name):
    set_delays(rank, 500)
    device = f"{GPU}:0"
    assert_same_weights(pipeline(device, rank, world, name), pipeline("cpu", rank, world, name), name)


def save_and_load(rank, world, folder):
    saved = train(GPU, rank, sharded)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
    fresh = sharded(Net(seed=9).to(GPU))
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(fresh, state["model"])
    assert_same_weights(host(fresh), host(saved), "loaded")


def test_checkpoints(fake_gpus, tmp_path):
    fake_gpus.run(save_and_load, world=2, backend="cpu:nvx,fakegpu:nvx", folder=str(tmp_path))


@on_fake_gpus(2)
def test_functional_collectives(rank, world):
    set_delays(rank, 500)
    side = torch.Stream(GPU)
    with side:
        mine = torch.full((6,), rank + 1.0).to(GPU)
        total = functional.all_reduce(mine, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
        part = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        assert torch.equal((total * 2).cpu(), torch.full((6,), 6.0))
        assert torch.equal(gathered.cpu(), torch.tensor([1.0] * 6 + [2.0] * 6))
        assert torch.equal(part.cpu(), torch.full((6,), 2.0 * (rank + 1)))


@on_fake_gpus(2)
def test_threads_with_streams_of_their_own(rank, world):
    set_delays(rank, 500)

    def run(group, first):
        with torch.Stream(GPU):
            for value in range(first, first + 20):
                tensor = torch.empty(500, device=GPU)
                slow_fill(tensor, rank + value, 1)
                work = dist.all_reduce(tensor, group=group, async_op=value % 3 != 0)
                if work:
                    work.wait()
                assert_all(tensor, 2 * value + 1)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(run, dist.new_group(), 100 * k) for k in range(3)]:
            done.result()


@on_fake_gpus(2)
def test_other_ways_to_wait(rank, world):
    set_delays(rank, 3000)
    side = torch.Stream(GPU)
    for way in ("synchronize", "block_current_stream"):
        tensor = torch.empty(1000, device=GPU)
        slow_fill(tensor, rank + 1, 10)
        work = dist.all_reduce(tensor, async_op=True)
        with side:
            getattr(work, way)()
            assert_all(tensor * 2, 6)


@on_fake_gpus(2)
def test_synchronize_lets_callbacks_run(rank, world):
    """torch calls synchronize() with the GIL, which the callback needs before the work can end."""
    for _ in range(5):
        tensor, seen = on_gpu(rank + 1), []
        if rank == 1:
            time.sleep(0.05)  # rank 0 waits before the operation ends
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().add_done_callback(lambda _, seen=seen: seen.append(True))
        work.synchronize()
        assert_all(tensor, 3)
        eventually(lambda seen=seen: seen == [True])


@on_fake_gpus(2)
def test_callbacks_that_compute_and_communicate(rank, world):
    """A callback's stream waits for the results. A wait inside the callback also orders that stream."""
    set_delays(rank, 2000)
    beside = dist.new_group()
    for value in range(5):
        tensor, second = torch.empty(1000, device=GPU), on_gpu(rank + value)
        slow_fill(tensor, rank + value, 20)

        def again(done, second=second):
            work = dist.all_reduce(second, group=beside, async_op=True)
            work.wait()
            return done.value()[0] + second

        future = dist.all_reduce(tensor, async_op=True).get_future().then(again)
        assert_all(future.wait(), 2 * (2 * value + 1))


@on_fake_gpus(2)
def test_windows_of_messages_and_collectives(rank, world):
    set_delays(rank, 1000)
    peer = 1 - rank
    got, total = torch.empty(1000, device=GPU), torch.empty(10, device=GPU)
    slow_fill(total, rank + 1, 10)
    with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as window:
        dist.isend(on_gpu(rank), peer)
        dist.irecv(got, peer)
        dist.all_reduce(total)
    with torch.Stream(GPU):
        window.wait()
        assert_all(got, peer)
        assert_all(total, 3)


@on_fake_gpus(2)
def test_inputs_within_outputs(rank, world):
    for asynchronous in (False, True):
        whole = torch.zeros(20).to(GPU)
        mine = whole[10 * rank : 10 * rank + 10].fill_(rank + 1)
        work = dist.all_gather_into_tensor(whole, mine, async_op=asynchronous)
        if work:
            work.wait()
        assert_all(whole[:10], 1)
        assert_all(whole[10:], 2)
        work = dist.reduce_scatter_tensor(mine, whole, async_op=asynchronous)
        if work:
            work.wait()
        assert_all(mine, 2 * (rank + 1))


@on_fake_gpus(2)
def test_tensors_of_autograd_and_of_inference(rank, world):
    parameter = nn.Parameter(on_gpu(rank + 1.0))
    dist.all_reduce(parameter)
    assert_all(parameter.detach(), 3)
    with torch.inference_mode():
        tensor = on_gpu(rank + 1.0)
    for times in (1, 2):
        dist.all_reduce(tensor, async_op=True).wait()
        assert_all(tensor, 3 * times)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(on_gpu(1, 1).expand(10))


@on_fake_gpus(2)
def test_only_the_roots_output_is_written(rank, world):
    set_delays(rank, 500)
    torch.accelerator.synchronize()
    reset_counts()
    for root in range(world):
        tensor = on_gpu(rank + 1)
        dist.reduce(tensor, root, async_op=True).wait()
        assert_all(tensor, 3 if rank == root else rank + 1)
        dist.broadcast(tensor, root, async_op=True).wait()
        assert_all(tensor, 3)
    assert counts()["data_recorded"] == 2, "once as the root of a reduce, once as no root of a broadcast"


@on_fake_gpus(2, backend="fakegpu:nvx")
def test_objects_where_there_is_only_the_device(rank, world):
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    one = [None]
    dist.scatter_object_list(one, [10, 11] if rank == 0 else None, 0)
    dist.barrier()
    dist.broadcast_object_list(one, 1)
    assert one == [11]


@on_fake_gpus(2, op_timeout=20)
def test_an_abort_ends_the_waiting_for_a_stream(rank, world):
    tensor = on_gpu(1)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(GPU))
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        threading.Timer(0.3, backend.abort).start()
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            work.wait()
        assert time.monotonic() - begin < 10
    assert_all(tensor, 1)


@on_fake_gpus(2)
def test_completed_work_has_its_result(rank, world):
    set_delays(rank, 10_000)
    tensor = on_gpu(rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        time.sleep(0.0005)
    assert torch.equal(peek(tensor), torch.full((1000,), 3.0))


def in_a_window(tensors):
    group = dist.group.WORLD
    group._start_coalescing(torch.device(GPU, 0))
    for tensor in tensors:
        group.allreduce([tensor])
    return group._end_coalescing(torch.device(GPU, 0))


@on_fake_gpus(2)
def test_windows_over_two_devices(rank, world):
    tensors = [torch.full((10,), rank + 1.0).to(f"{GPU}:{index}") for index in range(2)]
    for tensor in in_a_window(tensors).get_future().wait():
        assert_all(tensor, 3)


@on_fake_gpus(2)
def test_windows_waited_for_in_a_callback(rank, world):
    set_delays(rank, 30_000)
    beside = dist.new_group()
    first, tensors = torch.empty(10, device=GPU), [on_gpu(rank + 1) for _ in range(2)]
    slow_fill(first, 1, 20)
    windows = SimpleQueue()

    def later(_):
        window, future = windows.get()
        while not future.done():
            time.sleep(0.0005)
        window.wait()  # the window's calls are done, and their copies back are in flight
        return [tensor * 2 for tensor in tensors]

    doubled = dist.all_reduce(first, group=beside, async_op=True).get_future().then(later)
    window = in_a_window(tensors)
    windows.put((window, window.get_future()))
    for tensor in doubled.wait():
        assert_all(tensor, 6)


@on_fake_gpus(2)
def test_pending_result_does_not_overwrite_a_later_one(rank, world):
    """The last call determines the contents, as on one stream."""
    set_delays(rank, 3000)
    for i in range(5):
        whole, mine = torch.empty(2000, device=GPU), torch.full((1000,), rank + 10.0 * i).to(GPU)
        work = dist.all_reduce(whole, async_op=True)
        dist.all_gather_into_tensor(whole, mine)
        work.wait()
        assert torch.equal(whole.cpu(), torch.cat([torch.full((1000,), r + 10.0 * i) for r in range(world)]))


@on_fake_gpus(2)
def test_a_barrier_waits_for_the_device_it_is_given(rank, world):
    tensor = torch.zeros(100).to(f"{GPU}:1")
    slow_fill(tensor, 1, 50)
    dist.barrier(device_ids=[1])
    assert torch.equal(peek(tensor), torch.ones(100))
    bound = dist.new_group(device_id=torch.device(GPU, 1))
    slow_fill(tensor, 2, 50)
    dist.barrier(group=bound)
    assert torch.equal(peek(tensor), torch.full((100,), 2.0))


@on_fake_gpus(2)
def test_conjugated_and_negated_views(rank, world):
    """Uses the bare backend: torch resolves these views before a group's collectives."""
    set_delays(rank, 5000)
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    for make in (lambda t: t.conj(), lambda t: t.t().conj(), lambda t: t.conj().imag):
        tensor = make(torch.full((10, 3), 1 + 2j * (rank + 1)).to(GPU))
        want = make(torch.full((10, 3), 2 + 6j)).resolve_conj().resolve_neg()
        backend.allreduce([tensor]).wait()
        assert torch.equal(tensor.cpu().resolve_conj().resolve_neg(), want)


@on_fake_gpus(2)
def test_a_call_that_throws_is_not_counted(rank, world):
    def full(*_):
        raise RuntimeError("out of memory")

    tensor, before = on_gpu(rank + 1), nvx.sequence_number()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_copy_from", full, "PrivateUse1")
    with pytest.raises(RuntimeError, match="out of memory"):
        dist.all_reduce(tensor, async_op=True)
    library._destroy()
    assert nvx.sequence_number() == before
    dist.all_reduce(tensor, async_op=True).wait()
    assert_all(tensor, 3)
