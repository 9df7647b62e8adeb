"""Hosts that are connected with a job key: strangers on an admitted host, and ranks without the key."""

from __future__ import annotations

import re
import signal
import socket
import time

import pytest

pytest.importorskip("torch")

from tests.hosts.test_strangers import stranger

KEY = "a secret of the whole job, all ranks"
WITH_KEY = {"NVX_JOB_KEY": KEY, "NVX_DEBUG": "info"}


def test_collectives(cluster):
    assert len(set(cluster.start("collectives", 4, environment=WITH_KEY).results())) == 1
    assert "TCP with a job key" in cluster.logs()
    assert KEY not in cluster.logs()


def test_a_key_in_a_file_and_groups_made_later(cluster):
    path = cluster.folder / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    environments = [WITH_KEY, {**WITH_KEY, "NVX_JOB_KEY": f"@{path}"}]
    assert len(set(cluster.start("regroup", 4, environment=environments * 2).results())) == 1


def test_strangers_on_a_host_of_the_job_have_no_effect(cluster):
    cluster.start("keep_a_tensor", 4, environment=WITH_KEY, seconds=3, groups=True)
    with stranger(cluster, 1, 0, what="") as first, stranger(cluster, 0, 2, what="") as second:
        results = cluster.results()
    assert results == [[float(i) for i in range(16)]] * 4
    for tried, made, _ in (first, second):
        assert tried > 100
        assert made > 100, "they are admitted by address"
    assert first[2] + second[2] > 0, "visits of the same user, who does not know the tokens, to sockets of a set-up"
    logs = "".join((cluster.folder / f"rank{rank}.log").read_text() for rank in range(4))
    assert re.search(r"closed a connection from [0-9a-f.:]+ that was not authenticated with the job's", logs), logs


def test_a_killed_rank_is_named_everywhere_in_two_seconds(cluster):
    cluster.start("until_failure", 4, environment=WITH_KEY, what="large all_reduce")
    cluster.wait_for("ready")
    time.sleep(0.3)
    killed = time.time()
    cluster.send(3, signal.SIGKILL)
    for report in cluster.results(without=(3,))[:3]:
        dead = rf"rank 3 \(pid {cluster.ranks[-1].pid}, host {re.escape(socket.gethostname())}"
        assert re.search(dead, report["error"]), report["error"]
        assert report["when"] - killed < 2, f"reported after {report['when'] - killed:.2f} s"


def test_a_link_that_is_down_when_two_processes_first_communicate(cluster, hosts):
    cluster.start("communicate_late", 2, environment=WITH_KEY)
    cluster.wait_for("ready")
    hosts.set_link(1, "down")
    (cluster.folder / "go").touch()
    time.sleep(2)
    hosts.set_link(1, "up")
    assert cluster.results() == ["good", "good"]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (KEY + "!", r"rank 1 \(pid \d+, host .*\) and rank 0 \(pid \d+, .*\) have different keys in NVX_JOB_KEY"),
        ("", r"rank 0 \(pid \d+, .*\) has an NVX_JOB_KEY, and rank 1 \(pid \d+, .*\) has none"),
    ],
    ids=["another key", "no key"],
)
def test_ranks_without_the_key_are_named(cluster, other, error):
    cluster.start("begin", 2, environment=[WITH_KEY, {"NVX_JOB_KEY": other} if other else {}])
    for rank, process in enumerate(cluster.ranks):
        assert process.wait(60) != 0
        log = (cluster.folder / f"rank{rank}.log").read_text()
        assert re.search(error, log), log
        assert "set the same NVX_JOB_KEY on all ranks, or on none" in log
        assert KEY not in log


@pytest.mark.parametrize(
    ("key", "error"),
    [("@/nowhere", "(NVX_JOB_KEY), cannot be read: No such file"), ("", "NVX_JOB_KEY is set, but it was empty")],
    ids=["no file", "an empty value"],
)
def test_a_rank_that_cannot_read_the_key_notifies_the_others(cluster, key, error):
    cluster.start("begin", 2, environment=[WITH_KEY, {"NVX_JOB_KEY": key}])
    began = time.time()
    for rank, process in enumerate(cluster.ranks):
        assert process.wait(50) != 0
        log = (cluster.folder / f"rank{rank}.log").read_text()
        assert error in log, log
    assert time.time() - began < 30, "the set-up may take 60 s"
