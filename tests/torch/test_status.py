"""`nvx status`: what it reads of running ranks, and of processes that are none."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import warm
from nvx.commands import status
from ranks import eventually, only_nvx

pytestmark = only_nvx

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import nvx
rank = int(sys.argv[2])
dist.init_process_group("nvx", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
tensor = torch.ones(4)
dist.all_reduce(tensor)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
os._exit(0)
"""


class Job:
    """Two ranks that run the lines which a test gives them."""

    def __init__(self, folder, **environment):
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
        self.log = folder / "log"
        with open(self.log, "w") as log:
            self.ranks = [warm.Popen(["-c", PROGRAM, folder / "store", r], stderr=log, **how) for r in range(2)]
        for rank in range(2):
            assert self.answer(rank) == "ready"

    def pid(self, rank):
        return self.ranks[rank].pid

    def send(self, rank, line):
        self.ranks[rank].stdin.write(line + "\n")
        self.ranks[rank].stdin.flush()

    def answer(self, rank):
        return self.ranks[rank].stdout.readline().strip()

    def both(self, line):
        for rank in range(2):
            self.send(rank, line)
        self.done()

    def done(self):
        for rank in range(2):
            assert self.answer(rank) == "done"

    def group(self, rank):
        (found,) = status.gather(self.pid(rank))["ranks"]
        (group,) = found["groups"]
        return group

    def text(self):
        ranks = [rank for each in range(2) for rank in status.gather(self.pid(each))["ranks"]]
        return status.text({"ranks": ranks, "unread": []})

    def page(self):
        page, _ = status.open_page(self.pid(0))
        copy = os.pread(page, 1 << 22, 0)
        os.close(page)
        return copy

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("status"))
    yield job
    job.end()


def page_of(content):
    """A descriptor of a page with this content, as a rank has one."""
    page = os.memfd_create("nvx-status", os.MFD_CLOEXEC)
    os.pwrite(page, content, 0)
    return page


def test_an_idle_rank_shows_its_last_call_and_totals(job):
    job.both("dist.all_reduce(tensor); dist.broadcast(tensor, 0)")
    for rank in range(2):
        group = job.group(rank)
        assert (group["rank"], group["size"], group["state"], group["call"]) == (rank, 2, "open", None)
        assert group["last_finished"]["call"] == "broadcast(f32, 4 elements, root 0)"
        assert group["last_finished"]["number"] == group["issued"]
        assert group["totals"]["broadcast"]["bytes"] == 16 * group["totals"]["broadcast"]["calls"]
        assert group["totals"]["all_reduce"]["calls"] >= 2
        assert 0 < group["totals"]["all_reduce"]["seconds"] < 60, "of few calls all are timed"


def test_a_rank_that_never_calls_is_named(job, capsys):
    number = job.group(0)["issued"] + 1
    job.send(0, "dist.all_reduce(tensor)")
    eventually(lambda: job.group(0)["waits_for"] == 1, 20)
    group = job.group(0)
    assert (group["call"]["number"], group["call"]["call"]) == (number, "all_reduce(sum, f32, 4 elements)")
    time.sleep(0.1)
    assert job.group(0)["call"]["since_s"] > group["call"]["since_s"] + 0.09
    assert (job.group(1)["call"], job.group(1)["waits_for"]) == (None, None)
    shown = job.text()
    assert re.search(rf"^  0 +{job.pid(0)} +#{number} all_reduce.* rank 1  ", shown, re.MULTILINE), shown
    assert f"rank 1 (pid {job.pid(1)}) is waited for, and has not made that call" in shown
    os.kill(job.pid(1), signal.SIGSTOP)
    try:
        eventually(lambda: "rank 1" in job.text() and "is stopped" in job.text(), 20)
    finally:
        os.kill(job.pid(1), signal.SIGCONT)
    assert status.main([str(job.pid(0)), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["ranks"][0]["groups"][0]["waits_for"]) == (status.SCHEMA, 1)
    assert status.main([str(job.pid(0))]) == 0
    assert "rank 1 is waited for, and is not shown: leave out the PID, or use --hosts\n" in capsys.readouterr().out
    job.send(1, "dist.all_reduce(tensor)")
    job.done()
    assert job.group(0)["totals"]["all_reduce"]["seconds"] > 0.1
    (late,) = job.group(0)["waited_for"]
    assert (late["rank"], late["last_in"]) == (1, sum(before["last_in"] for before in group["waited_for"]) + 1)
    assert late["seconds"] > 0.1
    assert job.group(0)["waits_for"] is None
    assert "waited for rank 1: " in job.text()


def test_a_rank_that_was_read_later_and_has_made_the_call_is_not_accused():
    def member(rank, last, call=None, waits_for=None):
        call = call and {"number": call, "call": "barrier", "since_s": 0.01}
        last = {"number": last, "call": "barrier", "ago_s": 0.01}
        group = {"rank": rank, "state": "open", "call": call, "waits_for": waits_for, "last_finished": last}
        place = {"place": str(rank), "pid": rank, "stopped": False}
        return place, group | {"messages": None, "on_device": None}

    assert status.awaited_lines([member(0, 863, 864, 1), member(1, 865)], "") == []
    (line,) = status.awaited_lines([member(0, 863, 864, 1), member(1, 863)], "")
    assert line == "  rank 1 (pid 1) is waited for, and has not made that call: py-spy dump --pid 1"


def test_watch_goes_on_where_no_rank_has_a_group(monkeypatch, capsys):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "gather", lambda *given: {"ranks": [], "unread": []})
    monkeypatch.setattr(status.time, "sleep", interrupted)
    assert status.main(["--watch"]) == 0
    assert capsys.readouterr().out == "no process of this user has a group of nvx at present\n"


def test_the_ranks_of_several_hosts_are_one_report_and_a_host_without_answer_is_named(tmp_path, monkeypatch, capsys):
    """The test's ssh shows one rank as host a and the other one as host b."""
    job = Job(tmp_path)
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
a) exec sh -c "$3 {job.pid(0)}" ;;
b) exec sh -c "$3 {job.pid(1)}" ;;
e) echo 5 ;;
f) echo '{{"schema": 0}}' ;;
c) echo "Warning: a banner" >&2; echo "ssh: connect to host c port 22: Connection refused" >&2; exit 255 ;;
*) exec sleep 60 ;;
esac
""")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(status, "ANSWER_S", 15)
    try:
        job.send(0, "dist.all_reduce(tensor)")
        eventually(lambda: job.group(0)["waits_for"] == 1, 20)
        assert status.main(["--hosts", "d,a, b,c,e,f"]) == 0, "d uses up nobody's time"
        shown = capsys.readouterr().out
        assert shown.count("group 0: ") == 1 and "group 0: 2 of 2 ranks are on these hosts" in shown
        assert re.search(rf"^  0 +{job.pid(0)} on a +#2 all_reduce.* rank 1  ", shown, re.MULTILINE), shown
        assert f"rank 1 (pid {job.pid(1)} on b) is waited for, and has not made that call: py-spy dump" in shown
        assert "not shown: host c: ssh: connect to host c port 22: Connection refused\n" in shown
        assert "not shown: host d: no answer within 15 s\n" in shown
        assert "not shown: host e: no report\n" in shown
        assert "not shown: host f: its nvx has schema 0 of this report, and this command reads schema 1\n" in shown
        assert status.main(["--hosts", "a", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["hosts"], [rank["host"] for rank in printed["ranks"]]) == (["a"], ["a"])
        assert status.main(["--hosts", "a"]) == 0
        shown = capsys.readouterr().out
        assert "rank 1 is waited for, and is not shown: give the host of that rank to --hosts\n" in shown
        assert status.main(["--hosts", ", "]) == status.main(["--hosts", ""]) == 2
        assert capsys.readouterr().err == "nvx status: --hosts names no host\n" * 2
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        assert status.main(["--hosts", "a,,"]) == 2
        assert "No such file or directory: 'ssh'" in capsys.readouterr().err
    finally:
        job.end()


def test_a_receive_without_a_send_is_shown(job):
    job.send(0, "dist.recv(tensor, 1)")
    eventually(lambda: job.group(0)["messages"], 20)
    assert job.group(0)["messages"]["oldest"] == "recv(f32, 4 elements, from rank 1)"
    assert "recv(f32, 4 elements, from rank 1)" in job.text()
    job.send(1, "dist.send(tensor, 0)")
    job.done()
    assert job.group(0)["messages"] is None
    assert job.group(0)["totals"]["recv"] | {"seconds": 0} == {"calls": 1, "bytes": 16, "seconds": 0}


def test_a_rank_at_full_speed_is_read_without_a_tear(job):
    first = job.group(0)["issued"]
    for rank in range(2):
        sums = "dist.all_reduce(tensor); dist.all_reduce(tensor.double(), dist.ReduceOp.MAX)"
        job.send(rank, f"for _ in range(20000): {sums}")
    kinds, met = ("all_reduce(max, f64, 4 elements)", "all_reduce(sum, f32, 4 elements)"), set()
    for read in range(2000):
        if read >= 50 and len(met) == 2:
            break
        group = job.group(0)
        last, call = group["last_finished"], group["call"]
        met.update([name for name in ("last_finished", "call") if (group[name] or {"number": 0})["number"] > first])
        for each in (last, call):
            if each and each["number"] > first:
                assert each["call"] == kinds[(each["number"] - first) % 2]
        if call:
            assert call["number"] == last["number"] + 1
    assert len(met) == 2, "no call was read in flight"
    job.done()


def test_groups_come_and_go(job):
    job.both("other = dist.new_group([0, 1]); dist.barrier(other)")
    (found,) = status.gather(job.pid(0))["ranks"]
    assert [group["name"] for group in found["groups"]] == ["0", "1"]
    job.both("dist.destroy_process_group(other)")
    assert job.group(0)["rank"] == 0


def test_watch_repeats_until_ctrl_c(job):
    arguments = ["-m", "nvx.cli", "status", job.pid(0), "--watch", "--json"]
    with warm.Popen(arguments, stdout=subprocess.PIPE, text=True) as watch:
        shown = [json.loads(watch.stdout.readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 0
    assert [report["ranks"][0]["pid"] for report in shown] == [job.pid(0)] * 2


def test_a_damaged_page_is_refused_or_shown_but_harms_nobody(job):
    whole, rng = job.page(), random.Random(1)
    outcomes = set()
    for _ in range(300):
        torn = bytearray(whole[: rng.choice([0, 100, 4096, 5000, 1 << 20, 1 << 22])])
        for _ in range(rng.choice([0, 1, 10, 3000])):
            if torn:
                torn[rng.randrange(min(len(torn), rng.choice([600, 1 << 20])))] = rng.randrange(256)
        page = page_of(bytes(torn))
        try:
            groups = status.groups_of(page, status.layout_of(page))
            rank = {"pid": 1, "parent": 0, "command": "", "stopped": False, "groups": groups}
            shown = status.text({"ranks": [rank], "unread": []}) + json.dumps(groups)
            assert shown.replace("\n", "").isprintable()
            outcomes.add("shown")
        except status.Refused as why:
            outcomes.add(str(why))
        finally:
            os.close(page)
    assert {"shown", "its page is damaged"} <= outcomes, outcomes


def test_control_characters_of_a_page_are_not_printed(job):
    job.both("dist.all_reduce(tensor)")
    whole = job.page()
    for name in (b"all_reduce", b"f32", b"sum", b'"version":1'):
        evil = b'"version":"\\u001b[2J"' if b"version" in name else name + b"\\u001b[2J\\u009b"
        changed = whole[:4096].split(b"\0")[0].replace(name, evil, 1)
        page = page_of(changed.ljust(4096, b"\0") + whole[4096:])
        try:
            shown = json.dumps(status.groups_of(page, status.layout_of(page)), ensure_ascii=False)
        except status.Refused as why:
            shown = str(why)
        os.close(page)
        assert shown.isprintable() and "?[2J" in shown, shown


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"2I2i', b'"2I4si'), (b'"5Q4Bi', b'"5Q4Bf'), (b'"96s96s256s', b'"96B96s256s')],
)
def test_a_page_whose_fields_have_another_type_is_refused(job, before, after):
    whole = job.page()
    layout = whole[:4096].split(b"\0")[0].replace(before, after, 1)
    page = page_of(layout.ljust(4096, b"\0") + whole[4096:])
    with pytest.raises(status.Refused, match="page is damaged"):
        status.groups_of(page, status.layout_of(page))
    os.close(page)


def test_two_jobs_in_set_up_are_distinguished(job):
    group = {**job.group(0), "state": "set-up", "id": "0" * 16, "call": None, "waits_for": None}
    ranks = [{"pid": p, "parent": p // 10, "command": "", "stopped": False, "groups": [group]} for p in (10, 11, 20)]
    shown = status.text({"ranks": ranks, "unread": []})
    assert re.findall(r"group 0: (\d) of 2 ranks", shown) == ["2", "1"], shown


def test_a_process_that_ends_meanwhile_and_a_machine_without_proc_are_named(monkeypatch, capsys):
    assert "there is no process 4194305 on this machine" in status.refusal(4194305, PermissionError(13, "denied"))

    def missing(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(status.os, "listdir", missing)
    assert status.main([]) == 2
    assert "/proc cannot be read: No such file or directory. Next: mount it" in capsys.readouterr().err


def test_a_page_of_another_version_is_refused(job):
    page = page_of(job.page().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(status.Refused, match="version 2 of this page and this command reads version 1: use the nvx"):
        status.layout_of(page)
    os.close(page)


def test_a_process_without_nvx_and_a_job_that_has_ended_are_distinguished(tmp_path, capsys):
    job = Job(tmp_path, NVX_DEBUG="info")
    pid = job.pid(0)
    assert status.main([str(pid)]) == 0
    job.both("import time; time.sleep(0.3 * rank); dist.all_reduce(tensor)")
    job.both("dist.destroy_process_group()")
    assert re.search(r"group 0 rank 0 waited for: rank 1 0\.\d+ s \(last in \d calls?\)", job.log.read_text())
    capsys.readouterr()
    assert status.main([str(pid)]) == 0
    assert capsys.readouterr().out == f"without a group at present: process {pid}\n"
    job.end()
    assert status.main([str(pid)]) == 1
    assert f"there is no process {pid} on this machine. Next: `nvx status` without a PID" in capsys.readouterr().err
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert status.main([str(sleeper.pid)]) == 1
        sleeper.kill()
    assert " has a group of nvx at present" in capsys.readouterr().err


def test_another_user_is_refused(job):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        with open(writer, "w") as sys.stderr:
            ended = status.main([str(job.pid(0))])
        os._exit(ended)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert f"process {job.pid(0)} belongs to user root. Next: run this as that user, or as root" in text
