"""`nvx trace`: what ranks record with NVX_TRACE, and what the command makes of it."""

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time

import pytest
import warm
from nvx.commands import status, trace
from ranks import only_nvx

pytestmark = only_nvx

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import nvx
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nvx", store=dist.FileStore(store, 3), rank=rank, world_size=3)
tensor = torch.ones(4)
dist.all_reduce(tensor)
if rank == 2:
    time.sleep(0.8)
dist.all_reduce(tensor)
if rank == 0:
    dist.send(tensor, 1, tag=7)
elif rank == 1:
    dist.recv(tensor, 0, tag=7)
other = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(torch.ones(1 << 20), group=other)
    dist.destroy_process_group(other)
if rank == 0:
    print("ready", flush=True)
if rank == 2:
    sys.stdin.read()
dist.barrier()
os._exit(3 * (rank == 2))
"""


def start(folder, rank, **environment):
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    return warm.Popen(["-c", PROGRAM, folder / "store", rank], **how)


def waits_in_barrier(pid):
    groups = status.process(pid)["groups"]
    return bool(groups) and groups[0]["waits_for"] is not None and "barrier" in str(groups[0])


def events_of(path):
    """The events of each rank. Every wait must lie inside a call of its group, and calls must not overlap."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    ranks = {}
    for event in events:
        ranks.setdefault(event["pid"], []).append(event)
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    for each in ranks.values():
        calls = sorted((e for e in each if e.get("cat") == "collective"), key=lambda e: e["ts"])
        calls = [{"dur": float("inf"), **e} for e in calls]  # an open call has none
        for before, after in zip(calls, calls[1:], strict=False):
            assert before["tid"] != after["tid"] or before["ts"] + before["dur"] <= after["ts"] + 0.002
        for wait in (e for e in each if e.get("cat") == "wait" and e["ph"] == "X"):
            assert any(inside(wait, call) for call in calls), wait
    return list(ranks.values())


def inside(wait, call):
    ends = [event["ts"] + event["dur"] for event in (wait, call)]
    same = wait["tid"] == call["tid"] and wait["args"]["sequence"] == call["args"]["sequence"]
    return same and call["ts"] - 0.002 <= wait["ts"] and ends[0] <= ends[1] + 0.002


def waited(events, rank, number):
    """Microseconds that the call of the first group with this number waited for the rank."""
    mine = [e for e in events if e.get("cat") == "wait" and e["ph"] == "X" and e["tid"] == 0]
    return sum(e["dur"] for e in mine if (e["args"]["rank"], e["args"]["sequence"]) == (rank, number))


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_wait_names_the_late_rank_and_a_killed_job_leaves_its_trace(tmp_path, capsys, hosts):
    folder, output = tmp_path / "trace", tmp_path / "trace.json"
    ranks = [start(tmp_path, r, NVX_TRACE=str(folder), NVX_HOST_ID=f"host{r % hosts}") for r in range(3)]
    try:
        assert ranks[0].stdout.readline() == "ready\n"
        end = time.monotonic() + 60
        while not all(waits_in_barrier(rank.pid) for rank in ranks[:2]):
            assert time.monotonic() < end
            time.sleep(0.01)
        (shown,) = status.gather(ranks[0].pid)["ranks"]
        assert shown["groups"][0]["size"] == 3, "`nvx status` reads the file as it reads the memory"
        assert trace.main([str(folder), "-o", str(output)]) == 0, "also while the job runs"
        assert len(events_of(output)) == 3
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.communicate()
    assert trace.main([str(folder), "-o", str(output)]) == 0
    assert f"{output}: 3 ranks; open it in" in capsys.readouterr().out
    every = events_of(output)
    for rank, events in enumerate(every):
        names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"].endswith("_name")]
        assert names[0].startswith(f"rank {rank} (process {ranks[rank].pid}, host ")
        assert names[1] == f"group 0: rank {rank} of 3"
    call = next(e for e in every[0] if e["ph"] == "X" and e["name"] == "all_reduce" and e["args"]["sequence"] == 2)
    assert call["args"]["call"] == "all_reduce(sum, f32, 4 elements)"
    assert (call["args"]["bytes"], call["args"]["dtype"], call["args"]["group"]) == (16, "f32", "0")
    assert call["args"]["algorithm" if hosts == 1 else "schedule"]
    assert max(waited(events, 2, 2) for events in every[:2]) > 200_000, "a quarter of the delay"
    large = [e for e in every[0] if e["ph"] == "X" and e["tid"] == 1 and e["name"] == "all_reduce"]
    assert [e["args"]["bytes"] for e in large] == [4 << 20], "the group has gone, its calls have not"
    messages = [e for events in every for e in events if e.get("cat") == "message" and e["ph"] == "b"]
    assert {(e["name"], e["args"]["tag"], e["args"]["bytes"]) for e in messages} == {
        ("send to rank 1", 7, 16),
        ("recv from rank 0", 7, 16),
    }
    (open_call,) = [e for e in every[1] if e["ph"] == "B" and e["cat"] == "collective"]
    assert open_call["name"] == "barrier"
    for options in (["-o", str(tmp_path / "absent" / "out.json")], ["--flight-recorder", str(output)]):
        with pytest.raises(status.Refused, match="No such file or directory|File exists"):
            trace.main([str(folder), *options])
    reader, writer = os.pipe()
    assert trace.main([str(folder), "-o", f"/dev/fd/{writer}"]) == 0
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert json.load(pipe)["traceEvents"]
    assert capsys.readouterr() == ("", f"/dev/fd/{writer}: 3 ranks; open it in ui.perfetto.dev or chrome://tracing\n")
    layout, file = trace.Rank(max(folder.iterdir())).layout, max(folder.iterdir())
    os.truncate(file, layout["trace"][0] + 10 * struct.calcsize("<" + layout["trace"][2]))  # a copy of a part
    assert trace.main([str(folder), "-o", str(output)]) == 0
    printed = capsys.readouterr()
    assert ": 2 ranks; " in printed.out and f"not shown: {file}: it is damaged, or no trace\n" in printed.err


def test_a_command_is_traced_and_its_status_returned(tmp_path, capsys):
    output = tmp_path / "out.json"
    program = "import sys; sys.argv[2] = '0'; import torch.distributed as dist, nvx\n" + (
        "dist.init_process_group('nvx', store=dist.HashStore(), rank=0, world_size=1); dist.barrier(); sys.exit(5)"
    )
    arguments = ["-o", str(output), "--", sys.executable, "-c", program, "", ""]
    assert trace.main(arguments) == 5
    (events,) = events_of(output)
    assert [e["name"] for e in events if e["ph"] == "X"] == ["barrier"]
    assert "1 rank; open it in ui.perfetto.dev" in capsys.readouterr().out
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "nvx.cli", "trace", *arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (5, ""), "the reader of its output has gone"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_goes_to_the_command_and_leaves_its_trace(tmp_path, number):
    output = tmp_path / "out.json"
    program = "import time, torch.distributed as dist, nvx\n" + (
        "dist.init_process_group('nvx', store=dist.HashStore(), rank=0, world_size=1); dist.barrier()\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    # The process that runs the tests may ignore SIGHUP, and children inherit that.
    before = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); from nvx import cli"
    command = ["-c", f"{before}; sys.exit(cli.main(sys.argv[1:]))", "trace", "-o", output, "--", sys.executable, "-c"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    traced = warm.Popen([*command, program], stdout=subprocess.PIPE, env=environment, text=True)
    assert traced.stdout.readline() == "ready\n"
    traced.send_signal(number)
    assert traced.communicate(timeout=60)[0].startswith(f"{output}: 1 rank; ")
    assert traced.returncode == 128 + number
    assert [e["name"] for e in events_of(output)[0] if e["ph"] == "X"] == ["barrier"]
    assert list(tmp_path.iterdir()) == [output]


def test_malformed_trace_is_refused(tmp_path, capsys):
    assert trace.main([str(tmp_path)]) == 1
    assert "no rank has recorded anything in" in capsys.readouterr().err
    (tmp_path / "nvx-trace.abcdef").write_bytes(b'{"version":1}\0' * 1000)
    (tmp_path / "nvx-trace.ghijkl").write_bytes(b"")
    assert trace.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("its page is damaged") == 2
    assert trace.main([str(tmp_path / "absent")]) == 1
    assert f"nvx trace: there is no folder {tmp_path / 'absent'}\n" in capsys.readouterr().err
    assert trace.main(["--", str(tmp_path / "missing")]) == 127
    assert "cannot be run: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("field, value", [("size", (1 << 31) - 1), ("size", -1), ("rank", 1), ("rank", -1)])
def test_a_group_that_cannot_be_is_damage(tmp_path, capsys, field, value):
    """Dumps for torchfrtrace list the ranks of each group."""
    folder = tmp_path / "trace"
    program = "import torch.distributed as dist, nvx\n" + (
        "dist.init_process_group('nvx', store=dist.HashStore(), rank=0, world_size=1); dist.barrier()"
    )
    warm.run(["-c", program], env={**os.environ, "NVX_TRACE": str(folder)}, check=True)
    (path,) = folder.iterdir()
    layout = trace.Rank(path).layout
    at, _, form, fields = layout["sections"]["group"]
    with open(path, "r+b") as file:
        values = list(form.unpack(os.pread(file.fileno(), form.size, layout["at"] + at)))
        values[fields.index(field)] = value
        os.pwrite(file.fileno(), form.pack(*values), layout["at"] + at)
    assert trace.main([str(folder), "--flight-recorder", str(tmp_path / "dumps")]) == 1
    assert f"not shown: {path}: it is damaged, or no trace\n" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_the_trace_only(tmp_path):
    (tmp_path / "file").write_text("")
    program = "import torch.distributed as dist, nvx\n" + (
        "dist.init_process_group('nvx', store=dist.HashStore(), rank=0, world_size=1); dist.barrier(); print('done')"
    )

    def told(folder):
        environment = {**os.environ, "NVX_TRACE": str(folder)}
        ended = warm.run(["-c", program], capture_output=True, text=True, env=environment)
        assert ended.stdout == "done\n"
        return ended.stderr

    assert "/file: this process is not traced: Not a directory" in told(tmp_path / "file")
    refused = told("/sys/nvx")
    assert "/nvx: this process is not traced: " in refused and "No such file" not in refused, "why it cannot be made"
    assert told(tmp_path / "made" / "for" / "it") == ""
    made = tmp_path / "made" / "for" / "it"
    assert stat.filemode(made.stat().st_mode) == "drwx------" and len(list(made.iterdir())) == 1
