"""Common set-up for tests of groups whose ranks change."""

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import BACKEND, eventually


def runner(pool):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(body, world, **settings):
        return pool.run(body, world=world, kind="bare", port=server.port, **settings)

    return run


def connect(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def begin(store, rank, world, seconds=20.0, **options):
    """Makes a default group that is not yet configured."""
    options.setdefault("enable_reconfigure", True)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world, timeout=timeout, **options)


def arrive(port, rank, world, **how):
    """Connects to the store on this port, begins the group, and returns the store."""
    store = connect(port)
    begin(store, rank, world, **how)
    return store


def exchange(store, what, rank, ranks):
    """Exchanges handles and returns those of these ranks, in this order."""
    store.set(f"{what}/{rank}", dist._get_reconfigure_handle())
    return [store.get(f"{what}/{r}").decode() for r in ranks]


def reconfigure(uuid, handles, seconds=20.0):
    return dist._reconfigure(uuid=uuid, handles=handles, timeout=timedelta(seconds=seconds))


def come_together(store, what, count):
    store.add(what, 1)
    eventually(lambda: store.add(what, 0) >= count, 20)


def here():
    return dist.get_rank(), dist.get_world_size()


def of_nobody(own):
    """A handle like this one, of a rank that never comes."""
    fields = own.split(":")
    fields[5] = f"{int(fields[5], 16) ^ 1:016x}"
    return ":".join(fields)


def own_backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def check_group(rank, size):
    """Asserts this rank and size, and that all ranks of the group can communicate."""
    assert here() == (rank, size)
    assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (rank, size)
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    assert total.unique().tolist() == [size * (size + 1) / 2]
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    assert torch.cat(parts).tolist() == list(range(size))
    got = torch.full((3,), -1.0)
    if size > 1:
        ahead = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        ahead.wait()
        assert got.unique().tolist() == [(rank - 1) % size]
    dist.barrier()
