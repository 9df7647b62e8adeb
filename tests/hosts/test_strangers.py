"""Only the hosts of a job, with all of their addresses, and the addresses of `NVX_ALLOW_FROM` connect to its ranks
over TCP. Each test runs with both versions of UCX if two are installed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from nvx.bench.hosts import host_of

from tests.hosts.network import Hosts
from tests.hosts.stranger import listening
from tests.hosts.test_failures import LIBRARIES
from tests.hosts.world import ROOT, Cluster

both_versions = pytest.mark.parametrize("library", LIBRARIES, ids=["newest UCX", "the system's UCX"][: len(LIBRARIES)])


@contextlib.contextmanager
def clustered(hosts, folder):
    with hosts:
        cluster = Cluster(hosts, folder)
        try:
            yield cluster
        finally:
            cluster.end()


@contextlib.contextmanager
def stranger(cluster, host, rank, own="", what="tcp"):
    """Starts a stranger that attacks a rank's port, or Unix sockets. Yields the number of connections that it tried to
    make and has made, and that of connections to Unix sockets."""
    there = cluster.hosts.address(host_of(rank, len(cluster.ranks), cluster.hosts.count))
    command = [sys.executable, "-m", "tests.hosts.stranger", str(cluster.ranks[rank].pid), there]
    command += [own, str(cluster.folder / f"tensor{rank}"), *([what] if what else [])]
    process = subprocess.Popen(cluster.hosts.inside(host, command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    counts = []
    try:
        yield counts
    finally:
        process.send_signal(signal.SIGTERM)
        counts += map(int, process.communicate(timeout=30)[0].split())


@both_versions
def test_a_stranger_neither_writes_a_tensor_nor_ends_the_job(tmp_path, library):
    with clustered(Hosts(3), tmp_path) as cluster:
        cluster.start("keep_a_tensor", 2, environment=library, seconds=4, groups=True)
        with stranger(cluster, 0, 0, what="ipc") as of_ipc:
            cluster.wait_for("ready")  # before it, a connection may be made, and is closed
            with stranger(cluster, 2, 0) as first, stranger(cluster, 2, 1) as second:
                results = cluster.results()
        assert results == [[float(i) for i in range(16)]] * 2
        for tried, made, _ in (first, second):
            assert tried > 10
            assert made == 0
        assert of_ipc[2] > 10
        assert "tried to connect" in cluster.logs()


@pytest.fixture(scope="module")
def slow_ucx(tmp_path_factory):
    library = tmp_path_factory.mktemp("slow_ucx") / "slow_ucx.so"
    source = ROOT / "tests" / "hosts" / "slow_ucx.c"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@both_versions
def test_a_stranger_that_is_accepted_before_the_filter_writes_nothing(tmp_path, library, slow_ucx):
    with clustered(Hosts(3), tmp_path) as cluster:
        cluster.start("keep_a_tensor", 2, environment=library | slow_ucx, seconds=1)
        with stranger(cluster, 2, 0, what="early") as first, stranger(cluster, 2, 1, what="early") as second:
            results = cluster.results()
        assert results == [[float(i) for i in range(16)]] * 2
        assert first[0] >= 4 and second[0] >= 4


@both_versions
def test_a_stranger_that_is_let_in_does_harm(tmp_path, library):
    """The attack of the other tests is one: the tensor is written, or UCX before 1.16 ends the process."""
    with clustered(Hosts(3), tmp_path) as cluster:
        variables = library | {"NVX_ALLOW_FROM": cluster.hosts.address(2)}
        cluster.start("keep_a_tensor", 2, environment=variables, seconds=40)
        cluster.wait_for("ready")
        with stranger(cluster, 2, 0, what="early"):
            code = cluster.ranks[0].wait(60)
        assert code == -signal.SIGABRT or cluster.results() == [[666.0] * 16, [float(i) for i in range(16)]]


@both_versions
def test_a_connection_from_an_address_that_no_host_has_listed_is_refused(tmp_path, library):
    with clustered(Hosts(2), tmp_path) as cluster:
        cluster.start("keep_a_tensor", 2, environment=library, seconds=3)
        cluster.wait_for("ready")
        cluster.hosts.add_address(1, "10.77.0.99/24")
        with stranger(cluster, 1, 0, own="10.77.0.99") as (counts):
            results = cluster.results()
        assert results == [[float(i) for i in range(16)]] * 2
        assert counts[0] > 10
        assert counts[1] == 0


@both_versions
def test_a_host_may_come_from_any_of_its_addresses(tmp_path, library):
    with clustered(Hosts(2), tmp_path) as cluster:
        for host in range(2):
            cluster.hosts.add_address(host, f"10.77.1.{host + 1}/24")
            cluster.hosts.route_from(host, "10.77.0.0/24", f"10.77.1.{host + 1}")
        assert len(set(cluster.start("collectives", 2, environment=library, rounds=1).results())) == 1


@both_versions
def test_hosts_with_ipv6_alone(tmp_path, library):
    with clustered(Hosts(3), tmp_path) as cluster:
        hosts = cluster.hosts
        for host in range(3):
            hosts.add_address(host, f"fd00:77::{host + 1}/64")
            hosts.remove_address(host, f"{hosts.address(host)}/24")
        hosts.address = lambda host: f"fd00:77::{host + 1}"
        cluster.start("keep_a_tensor", 2, environment=library, seconds=3)
        cluster.wait_for("ready")
        with stranger(cluster, 2, 0) as counts:
            results = cluster.results()
        assert results == [[float(i) for i in range(16)]] * 2
        assert counts[0] > 10
        assert counts[1] == 0


@both_versions
def test_a_rank_listens_only_on_the_interface_that_leads_to_the_others(tmp_path, library):
    unset = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
    with clustered(Hosts(2), tmp_path) as cluster:
        cluster.hosts.add_idle_interface("eth5")
        served_at = cluster.hosts.address(0)
        cluster.start("keep_a_tensor", 2, environment={**library, **unset}, seconds=2, served_at=served_at)
        cluster.wait_for("ready")
        there = listening(str(cluster.ranks[1].pid))
        cluster.results()
        assert [address for address, _ in there] == ["02004D0A"], there


@both_versions
def test_new_groups_and_worlds_are_admitted(cluster, library):
    assert len(set(cluster.start("regroup", 4, environment=library).results())) == 1


def test_malformed_address_is_refused(cluster):
    cluster.start("begin", 2, environment={"NVX_ALLOW_FROM": "10.0.0.7;eth0"})
    for process in cluster.ranks:
        assert process.wait(60) != 0
    assert "NVX_ALLOW_FROM=10.0.0.7;eth0 is not a list of addresses" in cluster.logs()
