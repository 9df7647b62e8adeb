"""The errors of ranks on several hosts when a process dies, a link is down, or two hosts have one identity."""

from __future__ import annotations

import glob
import signal
import time

import pytest

pytest.importorskip("torch")


def kill_the_last(cluster, groups, waits, **more):
    cluster.start("wait_apart", 4, groups=groups, waits=waits, **more)
    cluster.wait_for("ready")
    time.sleep(0.5)
    cluster.send(3, signal.SIGKILL)
    return time.time()


# Rank 3 dies. A rank that waits for it fails; the others wait for each other in groups without it.
CHAINS = {
    "a rank of its host": ([[2, 3], [0, 2], [0, 1]], [[1, 2], [2, 0], [0, 3], None]),
    "a rank of the other host": ([[1, 3], [0, 1], [0, 2]], [[1, 1], [0, 3], [2, 0], None]),
}


@pytest.mark.parametrize("killed", [False, True], ids=["which ends", "which is killed"])
@pytest.mark.parametrize("first", CHAINS)
def test_first_failed_rank_is_named_in_all_groups(cluster, first, killed):
    groups, waits = CHAINS[first]
    ends = 2 if first == "a rank of its host" else 1
    kill_the_last(cluster, groups, waits, killed=[ends] if killed else [])
    report = cluster.results(without=(3, *([ends] if killed else [])))
    for rank in {0, 1, 2} - ({ends} if killed else set()):
        assert "global rank 3, pid" in report[rank]["error"], report[rank]["error"]


def test_a_dead_process_fails_all_groups_that_it_is_in_at_once(cluster):
    """Rank 0 waits for rank 2, which learns of the death in a group of two and stays alive."""
    dead = kill_the_last(cluster, [[2, 3], [0, 2, 3]], [[1, 2], None, [0, 3], None], stay=5)
    cluster.send(1, signal.SIGKILL)
    report = cluster.results(without=(1, 3))[0]
    assert "rank 2 (global rank 3, pid" in report["error"], report["error"]
    assert report["when"] - dead < 3


def test_the_silence_of_a_host_is_reported_for_all_groups_at_once(cluster, hosts):
    """Rank 0 has no connection to rank 3, and gets none: each group would wait for that on its own."""
    groups = [[0, 1, 2, 3]] * 15
    cluster.start("wait_apart", 4, {"NVX_LIVENESS_S": 3}, groups=groups, waits=[[0, 2], None, None, None])
    cluster.wait_for("ready")
    hosts.set_link(1, "down")
    down = time.time()
    cluster.ranks[0].wait(30)
    for rank in (1, 2, 3):
        cluster.send(rank, signal.SIGKILL)
    report = cluster.results(without=(1, 2, 3))[0]
    assert "did not answer pings" in report["error"] or "sign of life" in report["error"], report["error"]
    assert report["when"] - down < 6


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_alone_on_its_host_while_a_program_makes_its_own_group_is_named(cluster, victim):
    cluster.start("make_own_group", 2, victim=victim)
    report = cluster.results(without=(victim,))[1 - victim]
    assert f"rank {victim} (pid {cluster.ranks[victim].pid}, host" in report["error"], report["error"]
    assert "is lost" in report["error"] and report["after"] < 3, report


SYSTEMS = sorted(glob.glob("/usr/lib/*/libucp.so.0"))
LIBRARIES = [{}, *({"NVX_LIBUCP": path} for path in SYSTEMS[:1])]


@pytest.mark.parametrize("library", LIBRARIES, ids=["newest UCX", "the system's UCX"][: len(LIBRARIES)])
@pytest.mark.parametrize("down", [0, 1])
def test_a_link_that_is_down_when_two_processes_first_communicate(cluster, hosts, down, library):
    cluster.start("communicate_late", 2, environment=library)
    cluster.wait_for("ready")
    hosts.set_link(down, "down")
    (cluster.folder / "go").touch()
    time.sleep(5)
    hosts.set_link(down, "up")
    assert cluster.results() == ["good", "good"]
    assert "a process on another host cannot be reached" in cluster.logs()


def test_a_link_that_stays_down_is_named(cluster, hosts):
    cluster.start("communicate_late", 2, environment={"NVX_LIVENESS_S": 3})
    cluster.wait_for("ready")
    hosts.set_link(1, "down")
    (cluster.folder / "go").touch()
    for rank, words in enumerate(cluster.results()):
        assert f"rank {1 - rank} (pid" in words, words
        assert f"to {hosts.address(1 - rank)} (nvx0)" in words, words
        assert "Network is" in words and "NVX_SOCKET_IFNAME" in words, words


def test_a_timeout_ends_what_waits_for_a_link_that_is_down(cluster, hosts):
    cluster.start("communicate_late", 2, environment={"NVX_TIMEOUT_S": 4, "NVX_LIVENESS_S": 30})
    cluster.wait_for("ready")
    hosts.set_link(1, "down")
    (cluster.folder / "go").touch()
    for words in cluster.results():
        assert "timed out" in words, words
        assert float(words.split()[1]) < 6, words


def test_one_host_id_for_two_machines_is_refused(cluster):
    cluster.start("begin", 2, environment={"NVX_HOST_ID": "one"})
    time.sleep(0.1)
    for process in cluster.ranks:
        assert process.wait(60) != 0
    assert "have the same NVX_HOST_ID" in cluster.logs()


def test_an_ending_process_logs_the_peer_that_it_waits_for(cluster):
    cluster.start("end_before_the_others", 2, environment={"NVX_DEBUG": "info"})
    cluster.wait_for("ready")
    cluster.send(1, signal.SIGSTOP)
    (cluster.folder / "go").touch()
    assert cluster.ranks[0].wait(20) == 0
    cluster.send(1, signal.SIGCONT)
    cluster.results()
    log = (cluster.folder / "rank0.log").read_text()
    assert "this process ends when global rank 1 (pid" in log, log
