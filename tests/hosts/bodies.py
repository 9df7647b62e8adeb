"""The bodies of the ranks of tests/hosts. Run as a program: the body's name, the rendezvous folder, its arguments in
JSON. HOST is the network namespace that it enters."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import nvx  # noqa: F401  (registers itself where the package is not installed)
import torch
import torch.distributed as dist
from nvx.bench.hosts import enter

from tests.hosts.stranger import ESTABLISHED, sockets

FOLDER = Path()


def reach(name):
    (FOLDER / f"{name}{dist.get_rank()}").touch()


def begin(timeout=60.0, name="store", served_at=""):
    """`served_at`: the address at which rank 0 serves the store. Without it the store is a file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if served_at:
        store = dist.TCPStore(served_at, 29_400, world, is_master=rank == 0)
    else:
        store = dist.FileStore(str(FOLDER / name), world)
    dist.init_process_group("nvx", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    return rank, world


def check_collectives(rank, world, rounds=3, sizes=(1, 1000, 300_000)):
    """A few collectives of each kind, compared with exact results. Returns values that must be the same on all
    ranks."""
    total = world * (world + 1) // 2
    for _ in range(rounds):
        for size in sizes:
            x = torch.full((size,), float(rank + 1))
            dist.all_reduce(x)
            assert torch.all(x == total), "all_reduce"
            parts = [torch.empty(size) for _ in range(world)]
            dist.all_gather(parts, torch.full((size,), float(rank)))
            assert all(torch.all(part == r) for r, part in enumerate(parts)), "all_gather"
            out = torch.empty(size)
            dist.reduce_scatter(out, [torch.full((size,), float(rank + r)) for r in range(world)])
            assert torch.all(out == total - world + world * rank), "reduce_scatter"
            root = size % world
            x = torch.full((size,), float(rank))
            dist.broadcast(x, root)
            assert torch.all(x == root), "broadcast"
            outs = [torch.empty(size) for _ in range(world)]
            dist.all_to_all(outs, [torch.full((size,), float(100 * rank + r)) for r in range(world)])
            assert all(torch.all(got == 100 * r + rank) for r, got in enumerate(outs)), "all_to_all"
            send = dist.isend(torch.full((size,), float(rank)), (rank + 1) % world)
            x = torch.empty(size)
            dist.recv(x, (rank - 1) % world)
            send.wait()
            assert torch.all(x == (rank - 1) % world), "send and recv"
        dist.barrier()
    return total


def collectives(rounds=3, sizes=(1, 1000, 300_000), served_at=""):
    rank, world = begin(served_at=served_at)
    value = check_collectives(rank, world, rounds, sizes)
    dist.destroy_process_group()
    return value


def run_until_calm():
    """Runs collectives while the test disturbs the network, and once more after it touches `calm`."""
    rank, world = begin()
    check_collectives(rank, world, 1)
    reach("ready")
    calm = torch.zeros(1)
    while calm.item() == 0:
        calm = torch.tensor([float((FOLDER / "calm").exists())])
        check_collectives(rank, world, 1, (1, 5000, 100_000))
        dist.broadcast(calm, 0)
    dist.destroy_process_group()


def until_failure(what="all_reduce", timeout=60.0, again=0):
    """Runs collectives until one fails and returns its error and the time. Then the first `again` ranks make a new
    group in the same processes, which must work."""
    rank, world = begin(timeout)
    check_collectives(rank, world, 1, (1,))
    reach("ready")
    x = torch.ones(1 << 20 if what == "large all_reduce" else 4)
    try:
        while True:
            if what == "recv":
                dist.recv(x, world - 1) if rank != world - 1 else time.sleep(0.01)
            elif what == "barrier":
                dist.barrier()
            else:
                dist.all_reduce(x)
    except dist.DistBackendError as error:
        report = {"error": str(error), "when": time.time()}
    if again:
        dist.distributed_c10d._abort_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["WORLD_SIZE"] = str(again)
        rank, world = begin(timeout, "second")
        check_collectives(rank, world, 1)
        dist.destroy_process_group()
    return report


def reduce_some(count, times):
    """Runs only all-reduces between the marks `ready` and `done`."""
    rank, world = begin()
    x = torch.zeros(count)
    dist.all_reduce(x)
    dist.barrier()
    reach("ready")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    for _ in range(times):
        dist.all_reduce(x)
    reach("done")
    while not (FOLDER / "end").exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    return world


def connect_all():
    """The cost of a connection to every other process: descriptors and bytes for each peer of the second half. The
    first half also pays costs of once a process, such as UCX's buffer pools, which grow by hundreds of kilobytes."""
    rank, world = begin(300.0)
    half = world // 2
    halves = [dist.new_group(list(range(first, first + half))) for first in (0, half)]

    def held():
        dist.barrier()
        seen = resources()
        for _ in range(20):  # if two ranks connect to each other at once, UCX keeps one connection
            time.sleep(0.25)
            last, seen = seen, resources()
            if last[0] == seen[0]:
                break
        return seen

    def connect(group):
        size = dist.get_world_size(group)
        parts = [torch.empty(8) for _ in range(size)]
        dist.all_to_all(parts, [torch.full((8,), float(rank)) for _ in range(size)], group=group)
        assert sorted(part[0].item() for part in parts) == dist.get_process_group_ranks(group)

    connect(halves[rank // half])
    before = held()
    connect(dist.group.WORLD)
    after = held()
    dist.destroy_process_group()
    return [(now - then) / half for then, now in zip(before, after, strict=True)]


def end_at_once(count):
    """Rank 0 waits for no data and ends when its send has only begun."""
    rank, _ = begin()
    dist.barrier()
    reach("ready")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    x = torch.full((count,), float(2 - rank))
    dist.broadcast(x, 0)
    dist.destroy_process_group()
    return [x.min().item(), x.max().item()]


def be_late(count, seconds):
    """Rank 1 joins after the other rank has been sending for a while."""
    rank, _ = begin()
    dist.barrier()
    reach("ready")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    time.sleep(seconds * rank)
    x = torch.ones(count)
    dist.all_reduce(x)
    return [x.min().item(), x.max().item()]


def wait_apart(groups, waits, stay=0.0, killed=()):
    """For each rank, the group in which it waits and the rank it waits for, or nothing. Returns its error and the
    time."""
    rank, _ = begin()
    made = [dist.new_group(ranks) for ranks in groups]
    for group, ranks in zip(made, groups, strict=True):
        if rank in ranks:
            check_collectives(ranks.index(rank), len(ranks), 0)
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    reach("ready")
    if waits[rank] is None:
        time.sleep(30)
        os._exit(0)
    group, source = waits[rank]
    try:
        dist.recv(torch.ones(4), src=source, group=made[group])
    except dist.DistBackendError as error:
        report = {"error": str(error), "when": time.time()}
    if rank in killed:
        write_result(report)
        time.sleep(0.5)  # as a launcher ends the process
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(stay)
    return report


def keep_a_tensor(seconds, served_at="", groups=False):
    """Prints the address of a tensor that no peer may write to, and returns its contents at the end. The end comes as
    soon as that of rank 0 is written. `groups`: makes them too, so that Unix sockets are open."""
    x = torch.arange(16.0)
    (FOLDER / f"tensor{os.environ['RANK']}").write_text(str(x.data_ptr()))
    rank, world = begin(10.0, served_at=served_at)
    reach("ready")
    end = time.monotonic() + seconds
    go_on = torch.ones(1)
    while go_on.item() > 0:
        check_collectives(rank, world, 1, (1, 1000))
        if groups:
            group = dist.new_group()
            dist.all_reduce(total := torch.ones(1000), group=group)
            assert torch.all(total == world)
            dist.destroy_process_group(group)
        go_on = torch.tensor([float(time.monotonic() < end and x[0] == 0)])
        dist.broadcast(go_on, 0)
    dist.destroy_process_group()
    return x.tolist()


def time_calls(seconds):
    """Times all_reduces of 4 KiB. Returns when each began and what it took."""
    rank, _ = begin()
    x, go_on, calls = torch.zeros(1024), torch.ones(1), []
    dist.all_reduce(x)
    reach("ready")
    end = time.monotonic() + seconds
    while go_on.item() > 0:
        for _ in range(100):
            began = time.perf_counter()
            dist.all_reduce(x)
            calls.append((time.time(), time.perf_counter() - began))
        go_on = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(go_on, 0)
    assert not x.any()
    dist.destroy_process_group()
    return calls if rank == 0 else []


def regroup():
    """Makes groups of all ranks and of two, and then the same world again."""
    rank, world = begin()
    check_collectives(rank, world, 1, (1,))
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        x = torch.ones(1000)
        dist.all_reduce(x, group=pair)
        assert torch.all(x == 2)
    dist.destroy_process_group()
    rank, world = begin(name="second")
    value = check_collectives(rank, world, 1, (1,))
    dist.destroy_process_group()
    return value


def send_first(admitted):
    """The second host connects to the first and gets a reply. If it is admitted, the first one waits for the
    connection, and 1 s in which UCX accepts it: its own attempt to connect, for a ping, cannot succeed, and UCX would
    drop the other's connection for it."""
    rank, _ = begin()
    x = torch.full((4,), float(rank))
    try:
        if rank == 1:
            dist.send(x, 0)
            dist.recv(x, 0)
        else:
            if admitted:
                limit = time.monotonic() + 30
                while not sockets("self", ESTABLISHED):
                    assert time.monotonic() < limit, "no connection"
                    time.sleep(0.01)
                time.sleep(1)
            dist.recv(x, 1)
            dist.send(x, 1)
    except dist.DistBackendError as error:
        return str(error)
    assert torch.all(x == 1)
    return "good"


def communicate_late():
    """The hosts first communicate after the test has set the state of the link."""
    rank, world = begin()
    reach("ready")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    began = time.monotonic()
    try:
        check_collectives(rank, world, 1)
    except dist.DistBackendError as error:
        return f"after {time.monotonic() - began:.1f} s: {error}"
    return "good"


def end_before_the_others():
    """Rank 0 ends while the other rank is stopped."""
    rank, _ = begin()
    dist.barrier()
    reach("ready")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    return 0


def mismatched():
    rank, world = begin()
    check_collectives(rank, world, 1, (1,))
    try:
        if rank == world - 1:
            dist.broadcast(torch.ones(7), 0)
        else:
            dist.all_reduce(torch.ones(7))
        dist.all_reduce(torch.ones(7))
    except dist.DistBackendError as error:
        return str(error)
    return ""


def resources():
    """Open descriptors and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def many_groups(count):
    """Makes and drops groups; returns descriptors and memory before and after."""
    rank, world = begin()
    check_collectives(rank, world, 1)

    def one():
        group = dist.new_group(list(range(world)))
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)

    for _ in range(20):
        one()
    before = resources()
    for _ in range(count):
        one()
    after = resources()
    dist.destroy_process_group()
    return [before, after]


def training(kind):
    """A few steps of a small model. Returns the weights' sums on this rank, and in one process with all batches."""
    rank, world = begin()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    alone = copy.deepcopy(model)
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    totals = []
    for trained, mine in ((wrapped, slice(8 * rank, 8 * rank + 8)), (alone, slice(None))):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(5):
            torch.manual_seed(step)
            batch, target = torch.randn(8 * world, 64), torch.randn(8 * world, 8)
            loss = torch.nn.functional.mse_loss(trained(batch[mine]), target[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
        totals.append([p.detach().double().abs().sum().item() for p in whole])
    dist.destroy_process_group()
    return totals


def make_own_group(victim):
    """Two ranks make a group of three without torch. The victim ends once both have sent the other hosts their
    addresses. Returns the other rank's error and the time that it took from the end."""
    rank = int(os.environ["RANK"])

    def end():
        store = dist.FileStore(str(FOLDER / "store"), 3)
        while not store.check(["nvx/1/hosts/3/1", "nvx/1/hosts/3/2"]):
            time.sleep(0.01)
        time.sleep(1.0)
        (FOLDER / "ended").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Thread(target=end, daemon=True).start()
    options = nvx.Options(timeout=timedelta(seconds=20))
    try:
        nvx.ProcessGroup(dist.FileStore(str(FOLDER / "store"), 3), rank, 3, options)
    except dist.DistBackendError as error:
        return {"error": str(error), "after": time.time() - float((FOLDER / "ended").read_text())}
    return {"error": "made", "after": 0.0}


def write_result(value):
    rank = os.environ["RANK"]
    (FOLDER / f"result{rank}.part").write_text(json.dumps(value))
    (FOLDER / f"result{rank}.part").rename(FOLDER / f"result{rank}")


def main():
    global FOLDER
    body, folder, arguments = sys.argv[1:]
    FOLDER = Path(folder)
    enter(os.environ["HOST"])
    torch.set_num_threads(1)
    write_result(globals()[body](**json.loads(arguments)))


if __name__ == "__main__":
    main()
