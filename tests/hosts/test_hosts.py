"""nvx between hosts: network namespaces joined by veth. The tests cut and disturb the link, and stop and kill ranks.
Needs root; `make test-hosts` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.hosts.lossy_link import LossyHosts
from tests.hosts.network import Hosts
from tests.hosts.world import ROOT, Cluster


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_every_kind_of_collective(cluster, ranks):
    assert len(set(cluster.start("collectives", ranks).results())) == 1


def test_three_hosts(tmp_path):
    with Hosts(3) as hosts:
        cluster = Cluster(hosts, tmp_path)
        try:
            assert len(set(cluster.start("collectives", 3, rounds=1).results())) == 1
        finally:
            cluster.end()


@pytest.mark.parametrize("name", ["eth5", "wg7"])  # UCX before 1.16 selects an interface by its name
def test_an_interface_that_leads_nowhere_is_not_used(tmp_path, name):
    with Hosts(2) as hosts:
        hosts.add_idle_interface(name)
        cluster = Cluster(hosts, tmp_path)
        unset = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
        try:
            cluster.start("collectives", 2, environment=unset, rounds=1, served_at=hosts.address(0))
            assert len(set(cluster.results())) == 1
        finally:
            cluster.end()


@pytest.mark.parametrize(
    "environment", [{}, {"NVX_JOB_KEY": "a secret of the whole job, all ranks"}], ids=["UCX", "TCP"]
)
def test_hosts_with_link_local_addresses_alone_are_told_what_they_lack(tmp_path, environment):
    with Hosts(2) as hosts:
        for host in range(2):
            hosts.remove_address(host, f"{hosts.address(host)}/24")
        cluster = Cluster(hosts, tmp_path)
        try:
            cluster.start("begin", 2, environment=environment)
            for process in cluster.ranks:
                assert process.wait(60) != 0
            assert "Next: give an interface that leads to the other hosts an IPv4" in cluster.logs()
        finally:
            cluster.end()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_over_two_hosts_of_two(cluster, kind):
    results = cluster.start("training", 4, kind=kind).results()
    assert all(result == results[0] for result in results)
    together, alone = results[0]
    assert together == pytest.approx(alone, rel=1e-6)


def test_torchs_distributed_test_with_ranks_on_both_hosts(hosts, tmp_path):
    """All passes of tests/conformance, with the ranks on the hosts in turn; in CI those that have all collectives and
    messages, as CI runs the others on one host."""
    import nvx

    environment = dict(
        os.environ,
        **hosts.environment(),
        NVX_TEST_NETNS=f"{hosts.name(0)},{hosts.name(1)}",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(Path(nvx.__file__).parents[1])]),
    )
    report = tmp_path / "conformance.json"
    command = [sys.executable, "-m", "tests.conformance", "--quiet", "--json", str(report)]
    in_ci = bool(os.environ.get("CI_SHARD"))
    command += ["--pass", "gloo", "--pass", "nccl"] * in_ci
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    outcomes = [test["outcome"] for test in json.loads(report.read_text())["tests"]]
    assert outcomes.count("passed") > (60 if in_ci else 150)


def test_a_mismatch_is_named_on_every_rank(cluster):
    for words in cluster.start("mismatched", 2).results():
        assert "all_reduce" in words and "broadcast" in words, words


@pytest.mark.parametrize("what", ["all_reduce", "large all_reduce", "barrier", "recv"])
def test_a_killed_rank_is_named_everywhere_in_two_seconds(cluster, what):
    ranks = 4 if what == "all_reduce" else 2
    cluster.start("until_failure", ranks, what=what)
    cluster.wait_for("ready")
    time.sleep(0.3)
    killed = time.time()
    cluster.send(ranks - 1, signal.SIGKILL)
    for report in cluster.results(without=(ranks - 1,))[: ranks - 1]:
        dead = rf"rank {ranks - 1} \(pid {cluster.ranks[-1].pid}, host {re.escape(socket.gethostname())}"
        assert re.search(dead, report["error"]), report["error"]
        assert report["when"] - killed < 2, f"reported after {report['when'] - killed:.2f} s"


def test_survivors_of_a_killed_rank_make_a_group_in_the_same_process(cluster):
    cluster.start("until_failure", 4, again=3)
    cluster.wait_for("ready")
    cluster.send(3, signal.SIGKILL)
    for report in cluster.results(without=(3,))[:3]:
        assert "rank 3 (pid" in report["error"], report["error"]


@contextlib.contextmanager
def lossy(folder, **manner):
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("no /dev/net/tun here")
    with LossyHosts(**manner) as hosts:
        cluster = Cluster(hosts, folder)
        try:
            yield cluster
        finally:
            cluster.end()


@pytest.mark.parametrize(
    ("bound", "set_to"), [(3, {"NVX_LIVENESS_S": 3}), (10, {"NVX_LIVENESS_S": ""})], ids=["set", "by default"]
)
def test_a_host_that_falls_silent_is_named_in_time(tmp_path, bound, set_to):
    with lossy(tmp_path) as cluster:
        cluster.start("until_failure", 2, environment=set_to)
        cluster.wait_for("ready")
        cluster.hosts.fall_silent()
        silent = time.time()
        for rank, report in enumerate(cluster.results(60)):
            assert f"rank {1 - rank} (pid" in report["error"], report["error"]
            assert bound - 1 < report["when"] - silent < bound + 5, f"reported after {report['when'] - silent:.2f} s"


LIMITS_BACKOFF = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 15)


@pytest.mark.skipif(not LIMITS_BACKOFF, reason="the kernel cannot limit the time between retransmissions")
@pytest.mark.parametrize("key", ["", "a secret of the whole job, all ranks"], ids=["UCX", "job key"])
def test_a_host_that_is_silent_for_most_of_the_limit_is_waited_for(tmp_path, key):
    """Without a limit the kernel would send again after 6 and 13 seconds."""
    with lossy(tmp_path) as cluster:
        cluster.start("run_until_calm", 2, environment={"NVX_JOB_KEY": key} if key else {})
        cluster.wait_for("ready")
        cluster.hosts.fall_silent()
        time.sleep(7)
        cluster.hosts.end_silence()
        (tmp_path / "calm").touch()
        cluster.results(60)


def test_a_rank_that_stands_still_for_good_is_declared_lost_on_its_own_host_too(cluster):
    """The rank is the first of its host, so another rank of that host reports it there. When it continues, it is
    notified."""
    cluster.start("until_failure", 4, environment={"NVX_LIVENESS_S": 3})
    cluster.wait_for("ready")
    cluster.send(2, signal.SIGSTOP)
    stopped = time.time()
    time.sleep(9)
    cluster.send(2, signal.SIGCONT)
    seen = cluster.results(60)
    for rank in (0, 1, 3):
        assert "rank 2 (pid" in seen[rank]["error"], seen[rank]["error"]
        assert seen[rank]["when"] - stopped < 8, f"rank {rank} reported after {seen[rank]['when'] - stopped:.2f} s"
    assert re.search(r"global rank 2 \(pid \d+, host .*\) gives no sign of life for", cluster.logs()), cluster.logs()
    # The rank may first see that its connections have been closed.
    assert "whether this process was stopped" in seen[2]["error"] or " is lost: " in seen[2]["error"], seen[2]["error"]


def test_a_rank_that_stands_still_for_five_seconds_is_waited_for(cluster):
    cluster.start("run_until_calm", 2)
    cluster.wait_for("ready")
    cluster.send(1, signal.SIGSTOP)
    time.sleep(5)
    cluster.send(1, signal.SIGCONT)
    (cluster.folder / "calm").touch()
    cluster.results()
    assert "gives no sign of life" in cluster.logs()


def test_a_link_that_is_down_for_three_seconds(cluster, hosts):
    cluster.start("run_until_calm", 2)
    cluster.wait_for("ready")
    hosts.set_link(1, "down")
    time.sleep(3)
    hosts.set_link(1, "up")
    (cluster.folder / "calm").touch()
    cluster.results(180)


@contextlib.contextmanager
def slow_link(hosts, rate):
    """Limits the rate at which each host sends."""
    command = ["tc", "qdisc", "add", "dev", "nvx0", "root", "tbf", "rate", rate, "burst", "16kbit", "latency", "400ms"]
    for host in range(hosts.count):
        made = subprocess.run(hosts.inside(host, command), capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"this kernel limits no rates: {made.stderr.strip()}")
    try:
        yield
    finally:
        for host in range(hosts.count):
            subprocess.run(hosts.inside(host, ["tc", "qdisc", "del", "dev", "nvx0", "root"]), check=True)


def test_data_arrives_after_its_sender_has_ended(cluster, hosts):
    cluster.start("end_at_once", 2, count=500_000)
    cluster.wait_for("ready")
    with slow_link(hosts, "4mbit"):
        (cluster.folder / "go").touch()
        assert cluster.results(60) == [[2, 2], [2, 2]]


def test_a_slow_link_is_no_dead_one(cluster, hosts):
    cluster.start("be_late", 2, environment={"NVX_LIVENESS_S": 3}, count=300_000, seconds=5)
    cluster.wait_for("ready")
    with slow_link(hosts, "2mbit"):
        (cluster.folder / "go").touch()
        assert cluster.results(60) == [[2, 2], [2, 2]]


def test_loss_and_jitter_change_no_bit(tmp_path):
    with lossy(tmp_path, loss=0.01, jitter_ms=50) as cluster:
        assert len(set(cluster.start("collectives", 2, rounds=1, sizes=(1, 1000, 30_000)).results(300))) == 1


def test_after_a_failure_a_new_group_works(cluster, hosts):
    """Both ranks live on: the failure is a timeout, because one of them is late."""
    cluster.start("until_failure", 2, timeout=2.0, again=2)
    cluster.wait_for("ready")
    cluster.send(1, signal.SIGSTOP)
    threading.Timer(4, cluster.send, (1, signal.SIGCONT)).start()
    for report in cluster.results(60):
        assert "rank" in report["error"]


def test_a_sum_of_two_hosts_of_two_crosses_once_each_way(cluster, hosts):
    """Reads the interface counters, which include the headers of the kernel's packets."""
    count, times = 4 << 20, 5
    cluster.start("reduce_some", 4, count=count, times=times)
    cluster.wait_for("ready")
    before = [hosts.sent_bytes(host) for host in range(2)]
    (cluster.folder / "go").touch()
    cluster.wait_for("done")
    sent = [hosts.sent_bytes(host) - then for host, then in enumerate(before)]
    (cluster.folder / "end").touch()
    cluster.results()
    for bytes_of_host in sent:
        assert 1 <= bytes_of_host / (4 * count * times) < 1.02, sent


def test_a_connected_peer_costs_little_among_64_ranks(cluster):
    """Each rank is on a host of its own, by name, so each process connects to 63 others."""
    cluster.start("connect_all", 64, by_name=True)
    costs = cluster.results(300)
    descriptors, memory = (statistics.median(cost[i] for cost in costs) for i in (0, 1))
    print(f"a connected peer costs {descriptors:.2f} descriptors and {memory:.0f} bytes")
    assert descriptors <= 2
    assert memory <= 16 << 10


def test_groups_made_and_dropped_leave_nothing(cluster):
    for before, after in cluster.start("many_groups", 2, count=1000).results(300):
        assert after[0] <= before[0], "descriptors"
        assert after[1] - before[1] < 8 << 20, "memory"
