"""`nvx drill`: cases that pass, and each way in which a case can fail."""

import contextlib
import json
import os
import threading
import time
from collections import Counter

import pytest
import warm
from nvx import cli
from nvx.commands import drill


def run(*arguments, script="import sys; from nvx.commands import drill; sys.exit(drill.main(sys.argv[1:]))"):
    return warm.run(["-c", script, *arguments], capture_output=True, text=True, timeout=120)


def test_faults_are_reported_in_time_and_gloo_names_no_rank(tmp_path):
    file = tmp_path / "rows.json"
    ended = run("--fault", "kill", "--phase", "steady", "--vs", "gloo", "-J", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 case over nvx, 0 failed" in ended.stdout
    rows = {row["backend"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["nvx", "gloo"]
    report = rows["nvx"]
    assert report["named"] and "rank 2 (pid" in report["error"] and "signal 9" in report["error"]
    assert report["seconds"] <= report["limit"] and report["left"] == {}
    assert "no name" in rows["gloo"]["short"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--fault", "link", "link"], "no faults of links: network namespaces need root"),
        (
            ["--fault", "dtype", "--phase", "init"],
            "no case ran. Phases in which a fault makes sense: dtype: first, ",
        ),
        (["--vs", "glo"], "knows no backend 'glo'"),
        (["--fault", "kill", "-J", "/no/such/folder/rows.json"], "/no/such/folder/rows.json"),
    ],
)
def test_a_drill_that_cannot_run_fails_before_its_first_case(monkeypatch, capsys, arguments, why):
    monkeypatch.setattr(drill.hosts, "why_no_namespaces", lambda: "network namespaces need root")
    with contextlib.suppress(SystemExit):
        assert cli.main(["drill", *arguments]) == 2
    report = capsys.readouterr()
    assert why in report.err and report.out == ""


LITTER = """
import os, sys, time
from nvx.commands import drill
kill = drill.INJECTIONS["kill"]
def litter():
    if os.fork() == 0:
        time.sleep(60)
    open(f"/dev/shm/nvx-drill-test-{os.getppid()}", "w").close()
    kill()
drill.INJECTIONS["kill"] = litter
sys.exit(drill.main(sys.argv[1:]))
"""


def test_a_machine_without_shared_files_has_no_leftovers_there(monkeypatch):
    monkeypatch.setattr(drill.os, "listdir", lambda folder: os.scandir("/absent"))
    assert drill.shared_names() == set()


def test_leftovers_are_seen(tmp_path):
    file = tmp_path / "rows.json"
    try:
        ended = run("--fault", "kill", "--phase", "destroy", "-n", "2", "-J", file, script=LITTER)
    finally:
        for name in os.listdir("/dev/shm"):
            if name.startswith("nvx-drill-test-"):
                os.remove(f"/dev/shm/{name}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["short"] == ["leaves 1 processes, 1 shm"] and not row["error"]


GOOD = {"error": "rank 2 (pid 9) has ended", "right": True, "seconds": 0.1, "again_s": 0.1, "left": {}}


@pytest.mark.parametrize(
    ("fault", "phase", "report", "codes", "short"),
    [
        ("kill", "steady", {}, [0, 0], []),
        ("kill", "steady", {"error": "the process with pid 77 has ended"}, [0, 0], []),
        ("kill", "steady", {"error": "Connection closed by peer"}, [0, 0], ["no name"]),
        ("kill", "steady", {"error": "rank 20 has ended"}, [0, 0], ["no name"]),
        ("kill", "steady", {"error": ""}, [0, 0], ["no error"]),
        ("kill", "steady", {"seconds": 1.2}, [0, 0], ["late"]),
        ("stop", "steady", {"seconds": 2.5}, [0, 0], []),
        ("kill", "steady", {"again_s": None}, [0, 0], ["no new group"]),
        ("kill", "steady", {}, [0, 3], ["ends with [0, 3]"]),
        ("kill", "steady", {"left": {"socket": 2, "threads": 1}}, [0, 0], ["leaves 2 socket, 1 threads"]),
        ("kill", "steady", {"seconds": None}, [0, None], ["hangs"]),
        ("size", "steady", {"seconds": None}, [0, -6], ["another rank dies (-6)"]),
        ("kill", "destroy", {"error": ""}, [0, 0], []),
        ("kill", "destroy", {"error": "rank 2 has ended"}, [0, 0], ["an error"]),
        ("memory", "steady", {"error": ""}, [0, 0], []),
        ("memory", "steady", {"error": "", "right": False}, [0, 0], ["no error"]),
    ],
)
def test_a_case_fails(fault, phase, report, codes, short):
    same = {"error": report.get("error", GOOD["error"])}  # the ranks get the same; one of them has the flaw
    reports = [GOOD | same, GOOD | report]
    row = drill.judge(drill.Case("nvx", fault, phase, 3), 77, reports, codes, Counter())
    assert row["short"] == short, row
    assert row["works"] == (fault == "memory" and not short)
    assert all(words in drill.verdict(row) for words in short)


def test_descriptors_and_threads_of_a_process_are_counted():
    before = drill.held()
    ends = os.pipe()
    thread = threading.Thread(target=os.read, args=(ends[0], 1))
    thread.start()
    assert drill.held() - before == {"pipe": 2, "threads": 1}
    os.write(ends[1], b"1")
    thread.join()
    for end in ends:
        os.close(end)
    end = time.monotonic() + 10
    while drill.held() - before:  # the kernel still lists a thread that has just been joined
        assert time.monotonic() < end, drill.held() - before
        time.sleep(0.01)
