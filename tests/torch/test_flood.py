"""Another user of the host floods the ranks' Unix sockets with connections while one rank is late."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, one_host, only_nvx

pytestmark = [
    only_nvx,
    one_host,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]
TIMEOUT = 20.0

# Drops root's rights itself, because other users may be unable to run this Python. Reports when a socket of each of
# the first processes has been full.
FLOODER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
awaited, victims = int(sys.argv[1]), [f"@nvx-{pid}-" for pid in sys.argv[2:]]
full, reported, parent = set(), False, os.getppid()
while os.getppid() == parent:
    with open("/proc/net/unix") as table:
        rows = [row.split() for row in table]
    names = [row[7] for row in rows if len(row) == 8 and row[3] == "00010000"]
    for name in names:
        victim = next((v for v in victims if name.startswith(v)), None)
        while victim:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.setblocking(False)
                try:
                    client.connect("\\0" + name[1:])
                except BlockingIOError:
                    full.add(victim)
                    break
                except OSError:
                    break
    if not reported and full.issuperset(victims[:awaited]):
        reported = True
        print("full", flush=True)
"""


def start_flood(awaited, pids):
    command = [sys.executable, "-I", "-S", "-c", FLOODER, str(awaited), *map(str, pids)]
    flood = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert flood.stdout.readline() == b"full\n"
    return flood


def joins_late(rank, world, path):
    """Must be set up within its timeout."""
    store = dist.FileStore(path, world)
    store.set(f"pid{rank}", str(os.getpid()))
    flood = None
    try:
        if rank == world - 1:
            pids = [int(store.get(f"pid{r}")) for r in range(world)]
            flood = start_flood(world - 1, pids)
        dist.init_process_group(
            BACKEND,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )
        total = torch.ones(100)
        dist.all_reduce(total)
        assert total.unique().tolist() == [world]
        dist.destroy_process_group()
    finally:
        if flood:
            os.kill(flood.pid, signal.SIGKILL)
            flood.wait()
            flood.stdout.close()


def test_set_up_with_a_late_rank(ranks, tmp_path):
    ranks.run(joins_late, world=4, kind="bare", path=str(tmp_path / "store"))
