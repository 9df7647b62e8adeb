"""Where the bench's ranks run: launchers, hosts, shared memory and cores."""

from __future__ import annotations

import itertools
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import nvx.cli  # noqa: E402
from nvx.bench import cli, hosts, peers, probe, sockets, world  # noqa: E402


def test_a_shell_of_srun_is_no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    assert world.placed() is None
    monkeypatch.setenv("PMI_SIZE", "2")
    assert world.placed() == (0, 2)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(world.LaunchError, match=r"pip install mpi4py; .* unset OMPI_COMM_WORLD_RANK and PMI_RANK"):
        world._rendezvous_over_mpi()


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "a", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": ""},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {"PMI_RANK": "0", "PMI_SIZE": "many"},
    ],
)
def test_variables_of_no_launcher_are_refused(monkeypatch, capsys, given):
    for name in [*itertools.chain(*world.RANK_NAMES), "MASTER_ADDR", "MASTER_PORT"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert nvx.cli.main(["bench", "all_reduce"]) == 2
    assert capsys.readouterr().err == f"nvx bench: {world.INCOMPLETE}\n"


@pytest.mark.parametrize("here, host", [(2, "127.0.0.1"), (1, "a")])
def test_ranks_of_one_machine_under_mpirun_need_no_name_of_it(monkeypatch, here, host):
    size = types.SimpleNamespace(Get_size=lambda: here)
    comm = types.SimpleNamespace(Get_size=lambda: 2, Split_type=lambda kind: size, bcast=lambda place, root: place)
    mpi = types.SimpleNamespace(COMM_WORLD=comm, COMM_TYPE_SHARED=0)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(world.socket, "gethostname", lambda: "a")
    assert world._rendezvous_over_mpi().startswith(f"tcp://{host}:")


def test_a_number_of_ranks_that_the_launcher_does_not_have_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        cli.parse_sweep(["all_reduce", "-n", "4"])
    assert "-n 4, but RANK and WORLD_SIZE, or MPI's, give 1: unset them" in capsys.readouterr().err
    assert cli.parse_sweep(["all_reduce", "-n", "1"]).ranks == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_without_common_memory_or_interface_do_without(monkeypatch, rank):
    """Rank 1 finds no file of rank 0's machine; rank 0 waits for a connection to its own loopback."""
    us = types.SimpleNamespace(rank=rank, size=2, barrier=bool, agreed=lambda reason: reason or "rank 1: no page")
    us.device = torch.device("cpu")
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda names, src: names)
    page = probe._shared_page(us)
    assert page is None if rank else len(page) >= 4096
    assert probe.flag_round(us) is None
    us.agreed = lambda reason: reason
    monkeypatch.setattr(sockets, "CONNECT_S", 0.1)
    with pytest.raises(peers.Unsupported, match="between hosts, GLOO_SOCKET_IFNAME names their interface"):
        if rank:
            monkeypatch.setattr(sockets.socket, "create_connection", lambda *given: open("/absent"))
        sockets.SocketContender("socket", us)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent")
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", None)  # the other may be in agreed()
    with pytest.raises(peers.Unsupported, match="No such device"):
        sockets.SocketContender("socket", us)


def test_a_flag_round_between_ranks_of_one_core_is_measured_briefly(monkeypatch):
    us = types.SimpleNamespace(rank=0, size=2, agreed=lambda reason: reason, from_first=float)
    rounds = []
    bounce = types.SimpleNamespace(flag_round=lambda page, rank, count: rounds.append(count) or 0.02)
    monkeypatch.setattr(probe, "native", lambda: bounce)
    monkeypatch.setattr(probe, "_shared_page", lambda world: b"page")
    assert probe.flag_round(us) == 20000 and set(rounds) == {3}


def test_hosts_of_the_bench_use_their_own_interface(monkeypatch):
    """Also where the user has named one for the machine."""
    monkeypatch.setenv("NVX_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    made = hosts.Hosts(2).environment()
    assert {made[name] for name in ("GLOO_SOCKET_IFNAME", "NVX_SOCKET_IFNAME", "UCX_NET_DEVICES")} == {"nvx0"}


def test_hosts_are_not_made_where_they_cannot_be_joined(monkeypatch):
    def run(command, **_):
        refused = "link" in command
        return types.SimpleNamespace(returncode=int(refused), stderr="Operation not permitted\n")

    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: name)
    monkeypatch.setattr(hosts.subprocess, "run", run)
    assert hosts.why_no_namespaces().endswith("type veth peer name peer0: Operation not permitted")
