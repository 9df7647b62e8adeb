"""However a run of `nvx gpucheck` ends: what it has started ends with it, and its file says how far it came."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import sys
import time

import pytest
from gpucheck_runs import Apart, eventually, gone, script, states
from nvx.bench import machine
from nvx.commands import gpucheck
from nvx.gpucheck import mps, probe, processes, run

FIRST = ["facts", "correct", "streams"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_runs_and_leaves_the_file(tmp_path, number):
    run_apart = Apart(tmp_path, {"correct": "hang"}, FIRST)
    child = run_apart.hung()
    code, document, told = run_apart.ended(number)
    assert code == 128 + number, told
    assert states(document) == {"facts": "passed", "correct": "interrupted", "streams": "skipped"}
    why = [document["parts"][name]["why"] for name in FIRST[1:]]
    assert why == ["Ctrl-C" if number == signal.SIGINT else number.name, "interrupted"]
    assert eventually(lambda: gone(child)) and "correct was" not in told and f"written: {run_apart.file}" in told


ASKING = """
probe.ask = answers
probe._ASK = 'import time; open("{began}", "w"); time.sleep(600)'
"""
IMPORTING = """
import pathlib
def found(source):
    pathlib.Path("{began}").touch()  # a file that is closed by nobody but the collector may take the signal's exception
    time.sleep(600)
versions.found = found
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("before", [ASKING, IMPORTING], ids=["the driver is asked", "torch is imported"])
def test_a_signal_before_the_parts_leaves_a_file(tmp_path, number, before):
    began = tmp_path / "began"
    run_apart = Apart(tmp_path, {}, FIRST, before.format(began=began))
    assert eventually(began.exists)
    code, document, told = run_apart.ended(number)
    assert code == 128 + number, told
    assert {(part["state"], part["why"]) for part in document["parts"].values()} == {("skipped", "interrupted")}
    assert document["interrupted"] and {"machine", "versions", "command", "targets"} <= set(document)


def test_a_part_does_not_outlive_a_run_that_is_killed(tmp_path):
    run_apart = Apart(tmp_path, {"correct": "wait"}, FIRST)
    part = run_apart.hung()
    code, document, _ = run_apart.ended(signal.SIGKILL)
    assert code == -signal.SIGKILL and states(document)["facts"] == "passed"
    assert eventually(lambda: gone(part))


def test_ranks_do_not_outlive_a_part_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    rank = script(tmp_path / "rank", f"echo $$ >> {pids}; exec sleep 600")
    code = f"from nvx.gpucheck import workers\nworkers.sys.executable = {str(rank)!r}\nworkers.main(['gloo'])"
    part = processes.start([sys.executable, "-c", code])
    assert eventually(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    part.kill()
    part.wait()
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids.read_text().split())


def test_nobody_has_to_read_to_the_end(tmp_path):
    """As `nvx gpucheck | head -1`: the file is whole, and the exit status is the run's."""
    run_apart = Apart(tmp_path, {"streams": "fail"}, FIRST)
    assert run_apart.process.stdout.readline().startswith("nvx gpucheck: Imagined")
    run_apart.process.stdout.close()
    assert run_apart.process.wait(timeout=120) == 1
    assert run_apart.process.stderr.read() == ""
    document = json.loads(run_apart.file.read_text())
    assert states(document) == {"facts": "passed", "correct": "passed", "streams": "failed"}


def test_a_signal_is_heard_though_its_exception_is_dropped(check, monkeypatch):
    """As in a destructor, or where Python itself has called."""
    run_part = gpucheck.Check.run_part

    def hear_and_drop(*given):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        return run_part(*given)

    monkeypatch.setattr(gpucheck.Check, "run_part", hear_and_drop)
    code, document, ran = check(names=FIRST)
    assert code == 128 + signal.SIGTERM and document["interrupted"] == "SIGTERM"
    assert ran == FIRST[:1] and states(document)["facts"] == "passed"


def test_what_cannot_be_is_refused_before_anything_is_run(tmp_path, capsys):
    for wrong in (["--minutes", "0"], ["--parts", ","], ["--source", "/nowhere"], ["--program", "/nowhere"]):
        with pytest.raises(SystemExit):
            gpucheck.main(["-J", str(tmp_path / "x.json"), *wrong])
        assert wrong[0] in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


# ---- the file


def test_results_go_elsewhere_where_they_cannot_be_written(check, monkeypatch, tmp_path, capsys):
    """As in a checkout that is read-only."""
    monkeypatch.chdir(tmp_path)
    check.file.parent.write_text("a file where a folder should be")
    elsewhere, check.file = check.file, tmp_path / "found.json"
    monkeypatch.setattr(gpucheck, "main", lambda given, main=gpucheck.main: main(["-J", str(elsewhere), *given[2:]]))
    code, document, ran = check(names=FIRST)
    assert code == 0 and ran == FIRST and set(states(document).values()) == {"passed"}
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and f"cannot be written: the results go to {check.file}" in told.err
    assert f"written: {check.file}" in told.out


def test_a_disk_that_is_full_does_not_end_the_run(check, monkeypatch, capsys):
    written, write = [], machine.write

    def fill(path, contents):
        written.append(path)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, contents)

    monkeypatch.setattr(machine, "write", fill)
    code, document, ran = check(names=FIRST)
    assert code == 0 and ran == FIRST
    assert states(document) == {"facts": "passed", "correct": "skipped", "streams": "skipped"}
    told = capsys.readouterr()
    assert told.err.count("the results cannot be written") == 1 and "No space left on device" in told.err
    assert "passed: facts, correct, streams" in told.out and f"{check.file} has what was found before" in told.out


def test_tables_are_shown_though_their_file_cannot_be_written(check, monkeypatch, tmp_path, capsys):
    check(names=FIRST)
    (tmp_path / "in_the_way").write_text("")
    monkeypatch.chdir(tmp_path)
    assert gpucheck.main(["--table", str(check.file), "-J", str(tmp_path / "in_the_way" / "whole.json")]) == 0
    told = capsys.readouterr()
    assert "| facts | passed |" in told.out
    assert f"the results go to {tmp_path / 'whole.json'}" in told.err and (tmp_path / "whole.json").is_file()


# ---- the driver


def test_a_driver_that_hangs_is_left_behind(monkeypatch):
    """One in which a process is stuck that cannot be killed."""
    monkeypatch.setattr(probe, "_ASK", "import time; time.sleep(600)")
    monkeypatch.setattr(processes, "signal_group", lambda process, number: None)
    monkeypatch.setattr(processes, "members", lambda session: [])
    monkeypatch.setattr(processes, "KILLED", 0.2)
    monkeypatch.setattr(run, "READ", 0.2)
    started, start = [], processes.start
    monkeypatch.setattr(processes, "start", lambda *given, **how: started.append(start(*given, **how)) or started[-1])
    try:
        answer = probe.ask(0.5)
    finally:
        started[0].kill()
        started[0].wait()
    assert answer == probe.Answer(kind="driver hung", why="the driver did not answer within 0 s")


@pytest.mark.parametrize(
    ("answer", "why", "told"),
    [
        (probe.Answer(kind="no GPU", why="no driver"), "no GPU", "there is no GPU here: no driver"),
        (probe.Answer(kind="driver hung", why="no answer"), "driver hung", "no GPU can be used: no answer"),
        (probe.Answer(kind="driver refused", why="code 802", code=802), "driver refused (code 802)", "code 802"),
    ],
)
def test_why_no_gpu_can_be_used_is_in_the_file(check, monkeypatch, capsys, answer, why, told):
    monkeypatch.setattr(probe, "ask", lambda seconds=30: answer)
    code, document, ran = check()
    assert code == 2 and ran == [] and told in capsys.readouterr().out
    assert {part["why"] for part in document["parts"].values()} == {why}
    assert document["no_gpu"] == {"kind": answer.kind, "code": answer.code, "why": answer.why}


def test_asking_the_driver_is_within_the_runs_time(check, monkeypatch):
    asked = []

    def ask(seconds):
        asked.append(seconds)
        time.sleep(1.5)
        return probe.Answer([{"name": "Slow", "compute": "9.0"}])

    monkeypatch.setattr(probe, "ask", ask)
    code, document, ran = check(names=["facts"], minutes=0.1)
    assert asked[0] <= 6 and code == 0 and ran == []
    assert document["parts"]["facts"]["why"] == "time ran out" and document["minutes"] >= 0.02


# ---- MPS


def test_mps_is_within_a_parts_time(check, monkeypatch, tmp_path):
    """One that takes for ever to start costs a third of the limit, and the part runs without it."""
    quits = tmp_path / "quits"
    script(tmp_path / mps.CONTROL, f'[ "$1" = -d ] && exec sleep 600; cat > {quits}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    code, document, ran = check({}, ["bench_processes"], limit=9)
    assert time.monotonic() - began < 20
    found = document["parts"]["bench_processes"]
    assert code == 0 and ran == ["bench_processes"] and 0 < found["limit"] <= 6.1
    assert "timed out" in document["mps"]
    assert quits.read_text() == "quit\n", "it may have come up late"


def test_mps_is_found_where_the_driver_puts_it(check, monkeypatch, tmp_path):
    """Which may be a folder that PATH does not name."""
    log = tmp_path / "asked"
    control = script(tmp_path / mps.CONTROL, f'echo "$@" >> {log}')
    assert mps.control() is None
    monkeypatch.setattr(mps, "PLACES", ("/nowhere", str(tmp_path)))
    assert mps.control() == str(control)
    code, document, _ = check({}, ["bench_processes"])
    assert code == 0 and document["parts"]["bench_processes"]["mps"] and log.read_text().startswith("-d\n")


def test_a_daemon_that_keeps_its_output_is_not_waited_for(monkeypatch, tmp_path):
    daemon = tmp_path / "daemon"
    control = script(
        tmp_path / mps.CONTROL, f'[ "$1" = -d ] || exec kill $(cat {daemon})\nsleep 600 &\necho $! > {daemon}'
    )
    monkeypatch.setattr(mps, "control", lambda: str(control))
    began = time.monotonic()
    with mps.running(600) as (place, why):
        assert why == "" and pathlib.Path(place["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert time.monotonic() - began < mps.STARTS / 2
    assert eventually(lambda: gone(int(daemon.read_text())))


def test_a_signal_ends_mps_too(tmp_path):
    log = tmp_path / "asked"
    script(tmp_path / mps.CONTROL, f'echo "$@" >> {log}; cat >> {log}')
    path = f"{tmp_path}:{os.environ['PATH']}"
    run_apart = Apart(tmp_path, {"bench_processes": "hang"}, ["bench_processes"], PATH=path)
    run_apart.hung()
    _, document, _ = run_apart.ended(signal.SIGTERM)
    assert states(document) == {"bench_processes": "interrupted"} and log.read_text() == "-d\n\nquit\n"
