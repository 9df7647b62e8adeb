"""The bench as a user starts it, with short runs, over the backends of every torch build."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import warm

torch = pytest.importorskip("torch")

try:
    import nvx
except ImportError:  # not installed: the parts that need no compiled module run from the source tree
    WHERE = Path(__file__).parents[2] / "python"
else:
    WHERE = Path(nvx.__file__).parents[1]
BENCH = Path(__file__).parents[2] / "bench"
BRIEF = ("--blocks", "2", "--iters", "4", "-w", "1")


def bench(*arguments, launcher=()):
    """Runs the bench in its own processes, on the nvx that this process imports."""
    return run([*(launcher or (sys.executable,)), "-m", "nvx.bench", *arguments])


def in_checkout(script, *arguments):
    return run([sys.executable, str(BENCH / script), *arguments])


def run(command, timeout=180):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(WHERE), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def bench_of(ranks, *arguments):
    """The same from a launcher that has started the ranks; returns the output of rank 0."""
    if "nvx" not in sys.modules:
        return bench(*arguments, "-n", str(ranks))
    from nvx.bench import world

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = [world.rank_environment(rank, ranks, world.run_number()) for rank in range(ranks)]
    for place in places:
        place.pop("PYTHONPATH")  # the ranks find nvx as this process does
    with tempfile.TemporaryDirectory() as folder:  # not at a port, which another process may have
        command = ["-m", "nvx.bench", *arguments, world.RENDEZVOUS, f"file://{folder}/store"]
        started = [warm.Popen(command, env=os.environ | place, **pipes) for place in places]
        try:
            printed = [rank.communicate(timeout=90) for rank in started]
        finally:
            for rank in started:
                rank.kill()
    return subprocess.CompletedProcess(command, max(abs(rank.wait()) for rank in started), *printed[0])


def read(path):
    return json.loads(path.read_text())


def has_module():
    if "nvx" not in sys.modules:
        return False
    from nvx.bench.peers import native

    return native() is not None


def test_every_collective_is_right_and_timed(tmp_path):
    """Over nvx, where its C++ module is built for this torch, beside gloo and the call alone."""
    path = tmp_path / "results.json"
    over, vs = ("nvx", "gloo,null") if has_module() else ("gloo", "null")
    done = bench_of(2, "--all", "--sizes", "8,40000", "--backend", over, "--vs", vs, *BRIEF, "-J", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = read(path)
    results = document["results"]
    assert {each["backend"] for each in results} == {over, "gloo", "null"}
    assert len({each["collective"] for each in results}) == 10
    for each in results:
        assert each["time_us"] > 0 and each["p99_us"] >= each["p50_us"] > 0
        moves = each["backend"] != "null" and each["collective"] != "barrier"
        assert each["wrong"] == (0 if moves else None)
    for backend in {over, "gloo"}:
        gathers = [each for each in results if each["collective"] == "all_gather" and each["backend"] == backend]
        assert {each["variant"] for each in gathers} == {"out-of-place", "in-place"}
    assert done.stdout.count("Out of bounds values : 0 OK") == 10
    if over == "nvx":
        assert all(0 < value < 1e6 for value in document["flag_round_us"])
        assert document["versions"]["nvx_build"]["cpu_level"]


def test_dtypes_operations_roots_and_unaligned_buffers(tmp_path):
    path = tmp_path / "results.json"
    done = bench_of(
        3, "all_reduce", "broadcast", "--sizes", "1000", "-d", "float,bf16,int32", "-o", "sum,max",
        "-r", "all", "-u", "1", "-c", "2", "--backend", "gloo", *BRIEF, "-J", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(path)["results"]
    reduced = {(each["type"], each["redop"]) for each in found if each["collective"] == "all_reduce"}
    assert reduced == {(name, op) for name in ("float", "bfloat16", "int32") for op in ("sum", "max")}
    roots = {(each["type"], each["root"]) for each in found if each["collective"] == "broadcast"}
    assert roots == {(name, root) for name in ("float", "bfloat16", "int32") for root in range(3)}
    assert all(each["wrong"] == 0 for each in found)


def test_refusal_of_a_backend_is_noted_and_not_fatal(tmp_path):
    """Four operations at once, over two groups of one backend."""
    path = tmp_path / "results.json"
    done = bench_of(
        2, "all_reduce", "sendrecv", "--sizes", "4K", "-m", "4", "-o", "sum,avg", "--backend", "gloo", "--vs", "gloo",
        *BRIEF, "-J", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = read(path)
    assert {each["backend"] for each in document["results"]} == {"gloo", "gloo#2"}
    assert {each["collective"] for each in document["results"]} == {"all_reduce", "sendrecv"}
    reduced = {each["redop"] for each in document["results"] if each["collective"] == "all_reduce"}
    if "avg" not in reduced:  # a gloo without AVG
        assert any("avg" in name for name in document["notes"])
    assert "sum" in reduced


def changed_bench(folder, changes, *arguments):
    """Runs the bench with these statements before it in every rank."""
    script = folder / "changed.py"
    script.write_text(
        "import os, sys, torch, nvx.bench.peers as peers, nvx.bench.world as world\n"
        f"world.PROGRAM = ('-m', 'changed')\n{changes}\n"
        "from nvx.bench.cli import main\n"
        "sys.exit(main())\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder), str(WHERE)]))
    command = [sys.executable, str(script), *arguments, *BRIEF]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


def test_a_wrong_result_is_counted_and_fails(tmp_path):
    """The no-op backend, measured as if it were a real one, gets every element wrong."""
    changes = (
        "real = peers.TorchContender.__init__\n"
        "def corrupt(self, *given):\n"
        "    real(self, *given)\n"
        "    self.exact = True\n"
        "peers.TorchContender.__init__ = corrupt"
    )
    done = changed_bench(tmp_path, changes, "all_reduce", "--sizes", "4K", "--backend", "null")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout


def test_a_call_that_fails_is_no_refusal(tmp_path):
    changes = (
        "def fail(*given):\n"
        "    raise torch.distributed.DistBackendError('rank 1 is gone')\n"
        "real = peers.TorchContender.checked\n"
        "peers.TorchContender.checked = lambda self, case: fail if case.row.name == 'all_reduce' else real(self, case)"
    )
    done = changed_bench(tmp_path, changes, "all_reduce", "broadcast", "--sizes", "8,4K", "--backend", "gloo")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("# N/A: rank 0: failed: rank 1 is gone\n") == 1
    assert re.findall(r"Out of bounds values : 0 (\w+)", done.stdout) == ["FAILED", "OK"], done.stdout


def test_a_signal_that_ends_a_rank_is_named(tmp_path):
    changes = "if os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)"
    done = changed_bench(tmp_path, changes, "all_reduce", "--sizes", "8", "--backend", "gloo")
    assert (done.returncode, done.stderr) == (137, "nvx bench: rank 1 was ended by signal 9 (Killed)\n"), done


def test_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("NVX_AS", "gloo")  # gloo is gloo all the same
    path = tmp_path / "results.json"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = bench("all_gather", "--sizes", "4K", "--backend", "gloo", *BRIEF, "-J", str(path), launcher=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(path)["ranks"] == 2
    assert "torch.distributed" not in read(path)["command"]
    assert "nvx serves" not in done.stderr


def test_a_reader_that_has_seen_enough_ends_the_ranks_quietly():
    options = "all_reduce --backend gloo --sizes 8 --blocks 9999"
    command = [sys.executable, "-m", "nvx.bench", *options.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(WHERE), os.environ.get("PYTHONPATH", "")])}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline().startswith("# nvx bench all_reduce")
    started.stdout.close()
    printed = started.stderr.read()
    assert (started.wait(timeout=60), printed) == (0, "")


def test_a_backend_that_is_not_there_is_named():
    done = bench_of(2, "all_reduce", "--sizes", "8", "--backend", "nosuch", *BRIEF)
    assert done.returncode == 2
    assert "knows no backend 'nosuch'" in done.stdout


def test_a_missing_contender_is_left_out_and_reported():
    """torch knows the name of an Intel GPU's backend, and is seldom built with it."""
    if torch.distributed.is_xccl_available():
        pytest.skip("this torch has XCCL")
    done = bench_of(2, "all_reduce", "-b", "8", "-e", "20", "-f", "2", "--backend", "gloo", "--vs", "xccl", *BRIEF)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: xccl" in done.stdout
    assert "# 20 is no step of this scan: the largest size is 16\n" in done.stdout


@pytest.mark.slow
def test_training_steps_end_in_the_same_weights(tmp_path):
    path = tmp_path / "train.json"
    done = bench_of(2, "train", "--backend", "gloo", "--vs", "gloo", "--iters", "2", "--blocks", "1", "-J", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(path)["results"]
    assert [(each["kind"], each["backend"]) for each in results] == [
        (kind, name) for kind in ("ddp", "fsdp2") for name in ("gloo", "gloo#2", "alone")
    ]
    assert all(each["same_weights"] for each in results if each["backend"] != "alone")
    assert all(each["time_us"] > 0 for each in results)


@pytest.mark.slow
def test_training_steps_leave_out_what_has_no_results(tmp_path):
    done = bench_of(2, "train", "--backend", "gloo", "--vs", "null", "--iters", "1", "--blocks", "1", "--kinds", "ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# null: left out, a step needs a group whose results are right" in done.stdout


@pytest.mark.slow
def test_overlap(tmp_path):
    path = tmp_path / "overlap.json"
    done = in_checkout(
        "run.py", "overlap", "--backend", "gloo", "--vs", "", "-b", "1M", "--side", "128", "--iters", "4", "--blocks",
        "2", "-J", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    alone, beside = read(path)["results"]
    assert (alone["backend"], beside["backend"]) == ("alone", "gloo")
    assert alone["slowed_by"] == 0 and beside["product_us"] > 0


@pytest.mark.slow
def test_init_and_memory(tmp_path):
    path = tmp_path / "init.json"
    done = in_checkout("run.py", "init", "--backend", "gloo", "--vs", "null", "--samples", "1", "-J", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(path)["results"][0]["fresh_us"] > 0
    path = tmp_path / "memory.json"
    done = in_checkout(
        "run.py", "memory", "--backend", "gloo", "--vs", "", "--groups", "3", "-b", "64K", "--idle", "0.2",
        "-J", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    stages = read(path)["results"][0]["stages"]
    assert list(stages) == ["none", "one", "many", "used_small", "used"]
    assert all(stage["resident"] > 1 << 20 for stage in stages.values())


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW])
def test_a_signal_ends_the_ranks(number):
    paths = [str(WHERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep)}
    # A shell's background jobs ignore Ctrl-C, and their children inherit that.
    before = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, 0)"
    code = f"import sys; {before}; from nvx import cli; sys.exit(cli.main(['bench', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, "all_reduce", "--backend", "gloo", "--sizes", "8", "--iters", "100000000"]
    started = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    end = time.monotonic() + 60
    while len(ranks := children.read_text().split()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    started.send_signal(number)
    _, printed = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in printed, printed
    assert len(ranks) == 2 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
def test_targets_writes_one_file_and_judges_it_again(tmp_path):
    path = tmp_path / "targets.json"
    done = in_checkout("targets.py", "--backend", "gloo", "--parts", "init", "--quick", "-J", str(path))
    document = read(path)
    assert document["parts"]["init"]["command"].startswith("bench/run.py init")
    assert [verdict["goal"] for verdict in document["verdicts"]] == ["init and first collective"]
    again = in_checkout("targets.py", "--judge", str(path))
    assert again.returncode == done.returncode
    assert "init and first collective" in again.stdout
