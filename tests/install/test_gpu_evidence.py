"""scripts/gpu_evidence.py: the file records the outcome of each part, and the next part runs; and a dry run of all."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from _pytest.mark.expression import Expression

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRIVER = ROOT / "scripts" / "gpu_evidence.py"
STAND_IN = pathlib.Path(__file__).with_name("gpu_stand_in.py")
KERNELS = ["correct", "streams", "absent", "abort", "graph", "product", "host_calls", "processes", "killed"]


def load():
    spec = importlib.util.spec_from_file_location("gpu_evidence", DRIVER)
    module = sys.modules["gpu_evidence"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eventually(happens, seconds=60):
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


def gone(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


class Evidence:
    """Dry runs of the driver in this process or in their own, with a stand-in for nvx_gpu_simulated."""

    def __init__(self, monkeypatch, folder):
        self.driver, self.monkeypatch = load(), monkeypatch
        self.folder, self.file, self.log = folder, folder / "found.json", folder / "log"
        shutil.copy2(STAND_IN, folder / "nvx_gpu_simulated")
        (folder / "nvx_gpu_simulated").chmod(0o755)
        monkeypatch.setenv("NVX_STAND_IN_LOG", str(self.log))

    def words(self, *words):
        return ["--dry-run", "--from", str(self.folder), "-J", str(self.file), *words]

    def run(self, how, *words, limit=None):
        """The exit status, the states by part, and the programs that ran."""
        self.monkeypatch.setenv("NVX_STAND_IN", json.dumps(how))
        if limit:
            parts = tuple(part._replace(seconds=limit) for part in self.driver.PARTS)
            self.monkeypatch.setattr(self.driver, "PARTS", parts)
        self.log.write_text("")
        return self.of(*words).go(), self.states(), self.log.read_text().split()

    def of(self, *words):
        return self.driver.Run(self.driver.read_arguments(self.words(*words)))

    def tool(self, name, script):
        """In place of the simulated tool of this name."""
        self.monkeypatch.setattr(self.driver, "SIMULATED_TOOLS", self.folder)
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def part(self, name):
        return json.loads(self.file.read_text())["parts"][name]

    def states(self):
        return {name: part["state"] for name, part in json.loads(self.file.read_text())["parts"].items()}


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Evidence(monkeypatch, tmp_path)
    for one, handler in handlers.items():
        signal.signal(one, handler)


def test_parts_run_in_their_order_and_a_further_call_goes_on(evidence):
    code, states, ran = evidence.run({"streams": "skip"}, "--parts", "facts,kernels")
    assert code == 0 and ran == ["facts", *KERNELS]
    assert list(states) == [part.name for part in evidence.driver.PARTS[: len(states)]]
    assert states.pop("streams") == "skipped" and set(states.values()) == {"passed"}
    assert evidence.part("streams")["why"] == "no such thing here"
    assert evidence.part("facts")["rows"][0] == {"part": "facts", "figure": 1.5}
    assert "Driver Version" in evidence.part("nvidia_smi")["output"]
    code, states, ran = evidence.run({}, "--parts", "kernels")
    assert code == 0 and ran == ["streams"] and set(states.values()) == {"passed"}
    assert evidence.run({}, "--parts", "absent", "--again")[2] == ["absent"]


@pytest.mark.parametrize(
    ("how", "state", "why"),
    [
        ("fail", "failed", "it ended with code 1; all_reduce f32: wrong output"),
        ("segfault", "died", f"of signal {int(signal.SIGSEGV)}"),
        ("garbage", "passed", ""),
    ],
)
def test_a_part_that_goes_wrong_is_reported_and_the_rest_run(evidence, how, state, why):
    code, states, ran = evidence.run({"streams": how}, "--parts", "kernels")
    assert ran == KERNELS and code == (state != "passed")
    assert states.pop("streams") == state and set(states.values()) == {"passed"}
    found = evidence.part("streams")
    assert found["why"] == why and len(json.dumps(found)) < 20_000
    if how == "garbage":
        assert found["output"].endswith("a last word")


def test_a_part_that_hangs_is_ended_with_all_it_started(evidence):
    began = time.monotonic()
    code, states, ran = evidence.run({"streams": "hang"}, "--parts", "streams,absent", limit=5)
    assert time.monotonic() - began < 20 and code == 1 and ran == ["streams", "absent"]
    assert states == {"streams": "timed out", "absent": "passed"}
    assert eventually(lambda: gone(int((evidence.folder / "log.child").read_text())))
    assert evidence.run({}, "--parts", "streams,absent")[2] == [], "it would hang again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_runs_and_leaves_the_file(evidence, number):
    command = [sys.executable, str(DRIVER), *evidence.words("--parts", "absent,streams")]
    surroundings = os.environ | {"NVX_STAND_IN": json.dumps({"absent": "hang"})}
    process = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    child = evidence.folder / "log.child"
    assert eventually(lambda: child.exists() and child.read_text().endswith("\n"))
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in printed, printed
    assert evidence.states() == {"streams": "passed", "absent": "interrupted"}
    assert evidence.part("absent")["why"] == number.name and eventually(lambda: gone(int(child.read_text())))
    assert evidence.run({}, "--parts", "absent,streams")[1:] == ({"streams": "passed", "absent": "passed"}, ["absent"])


def test_a_time_limit_is_reported(evidence):
    code, states, ran = evidence.run({}, "--parts", "kernels", "--minutes", "0.01")
    assert code == 0 and ran == [] and set(states.values()) == {"skipped"}
    assert evidence.part("streams")["why"] == "time ran out"


def build_that_fails(run):
    (run.work / "log").write_text("work.cc: error: no")
    run.building = subprocess.Popen(["false"])


@pytest.mark.parametrize(
    "gpus, visible", [(1, None), (2, None), (8, None), (8, "3,5"), (2, "0,1,2"), (8, "7"), (8, ""), (8, "-1")]
)
def test_a_part_of_one_process_a_gpu_has_a_rank_for_each(evidence, gpus, visible):
    if visible is not None:
        evidence.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    evidence.tool("nvidia-smi", "\n".join(f"echo 'GPU {i}: Laptop GPU (UUID: GPU-1)'" for i in range(gpus)))
    gpus = min(gpus, len(visible.split(",")) if visible not in ("", "-1") else 0) if visible is not None else gpus
    if gpus < 2:  # it does not wait for the module to be built
        evidence.monkeypatch.setattr(evidence.driver.Run, "begin_build", lambda run, wanted: build_that_fails(run))
        assert evidence.run({}, "--parts", "one_each,symm_mem_8")[0] == 0
        assert evidence.part("one_each")["why"] == f"{gpus} GPU here: one process a GPU needs 2 or more"
        assert evidence.part("symm_mem_8")["why"] == f"{gpus} GPU here: one process a GPU needs 8 or more"
    else:
        part = next(part for part in evidence.driver.PARTS if part.name == "one_each")
        command = evidence.of().command(part, 60)
        assert command[command.index("-n") + 1] == str(gpus)


@pytest.mark.parametrize(
    "lists, wanted",
    [
        ("8.9\n8.9", ["-DTORCH_CUDA_ARCH_LIST=8.9+PTX", "-DNVX_VISIBLE_GPUS=ON"]),
        ("12.0\n9.0\n12.0", ["-DTORCH_CUDA_ARCH_LIST=9.0;12.0+PTX", "-DNVX_VISIBLE_GPUS=ON"]),
        ("NVIDIA-SMI has failed", []),
        (None, []),
    ],
)
def test_the_module_is_built_for_the_gpus_here(evidence, lists, wanted):
    evidence.tool("nvidia-smi", f"[ $1 = --query-gpu=compute_cap ] && echo '{lists}'" if lists else "exit 9")
    run = evidence.of()
    run.dry, start, scripts = False, evidence.driver.start, []

    def note(command, out, env):
        return scripts.append(command[-1]) if "sh" in command else start(command, out, env)

    evidence.monkeypatch.setattr(evidence.driver, "start", note)
    run.begin_build(list(evidence.driver.PARTS))
    options = [word for word in shlex.split(scripts[0]) if "ARCH_LIST" in word or "VISIBLE" in word]
    assert options == wanted


def test_a_file_of_another_commit_is_left_alone(evidence):
    evidence.file.write_text(json.dumps({"what": "gpu_evidence", "commit": "1", "dry_run": True, "parts": {}}))
    before = evidence.file.read_text()
    with pytest.raises(SystemExit, match="name another file"):
        evidence.run({}, "--parts", "streams")
    assert evidence.file.read_text() == before
    with pytest.raises(SystemExit):
        evidence.run({}, "--parts", "dance")


def test_parts_of_a_module_that_cannot_be_built_state_why(evidence, monkeypatch):
    monkeypatch.setattr(evidence.driver.Run, "begin_build", lambda run, wanted: build_that_fails(run))
    code, states, ran = evidence.run({}, "--parts", "torch_two_ranks,streams")
    assert code == 1 and ran == ["streams"] and states == {"streams": "passed", "torch_two_ranks": "failed"}
    assert evidence.part("torch_two_ranks")["why"].endswith("error: no")


def test_parts_that_need_no_module_run_while_it_is_built(evidence, monkeypatch):
    def build(self, wanted):
        (self.work / "log").write_text("error: no")
        script = f"until grep -q copies {evidence.log}; do sleep 0.05; done; exit 1"
        self.building = subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL)

    monkeypatch.setattr(evidence.driver.Run, "begin_build", build)
    _, states, ran = evidence.run({}, "--parts", "torch_two_ranks,copies,streams")
    assert ran == ["streams", "copies"] and list(states) == ["streams", "copies", "torch_two_ranks"]


def test_without_mps_processes_do_not_take_turns(evidence):
    quits = evidence.folder / "quits"
    evidence.tool(evidence.driver.MPS, f'[ "$1" = -d ] && {{ echo refused; exit 3; }}\ncat > {quits}')
    assert evidence.run({}, "--parts", "bench_processes")[1:] == ({"bench_processes": "skipped"}, [])
    assert "it ended with code 3 refused" in evidence.part("bench_processes")["why"]
    assert quits.read_text() == "quit\n", "it may have come up late"


def test_lines_of_pytest_become_rows():
    driver = load()
    text = """tests/torch/test_gpu.py::test_two_ranks[ddp-small buckets-2] PASSED     [ 50%]
tests/torch/test_gpu.py::test_staged[DTensor-2] SKIPPED (there is no GPU here) [100%]
1 passed, 1 skipped in 1.00s"""
    found = driver.read(driver.Outcome("passed"), text)
    assert found.rows == [
        {"test": "test_two_ranks[ddp-small buckets-2]", "state": "passed"},
        {"test": "test_staged[DTensor-2]", "state": "skipped", "why": "there is no GPU here"},
    ]
    assert found.state == "passed" and found.output == "1 passed, 1 skipped in 1.00s"
    assert driver.read(driver.Outcome("passed"), text.replace("PASSED", "SKIPPED")).state == "skipped"


FILES = "test_gpu", "test_gpu_cases"


@pytest.fixture(scope="module")
def collected():
    pytest.importorskip("torch")
    import warm

    words = ["-m", "pytest", "--collect-only", "-q", *(f"tests/torch/{file}.py" for file in FILES)]
    return warm.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("file", FILES)
def test_every_choice_of_tests_chooses_some(collected, file):
    """For a GPU and for a dry run."""
    lines = [line.partition("::") for line in collected.stdout.splitlines()]
    names = [name for path, _, name in lines if path.endswith(f"/{file}.py") and name]
    assert names, collected.stdout + collected.stderr
    for part in load().PARTS:
        if part.kind == "tests":
            chosen = Expression.compile(part.words if file == "test_gpu" else part.dry)
            assert any(chosen.evaluate(lambda word, name=name: word in name.lower()) for name in names), part


SIMULATED = ROOT / "build" / "make" / "cpp"
# `tests/gates/run simulated` builds what these need.
BY_KERNELS = ("torch_places",)
NOT_PLAYED = "nvx was not built with NVX_SIMULATED"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_has_every_part(tmp_path):
    if "NVX_TEST_EVIDENCE" not in os.environ:  # the gate `simulated` runs most of these tests
        pytest.skip("NVX_TEST_EVIDENCE=1 is not set: it takes 3 minutes")
    if not (SIMULATED / "nvx_gpu_simulated").exists():
        pytest.skip(f"nvx_gpu_simulated is not built in {SIMULATED}")
    file = tmp_path / "found.json"
    command = [sys.executable, str(DRIVER), "--dry-run", "--minutes", "14", "-J", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    found = json.loads(file.read_text())["parts"]
    assert list(found) == load().NAMES, printed.stdout + printed.stderr
    bad = {name: part["why"] for name, part in found.items() if part["state"] != "passed"}
    allowed = {"pairs": "pairs need two"} | (
        {} if os.environ.get("NVX_SIMULATED_DIR") else dict.fromkeys(BY_KERNELS, NOT_PLAYED)
    )
    assert all(name in allowed and allowed[name] in why for name, why in bad.items()), bad
    assert all(part["rows"] or part["output"] for name, part in found.items() if name not in bad)
    with contextlib.suppress(ImportError):
        import gpu_targets

        assert gpu_targets.judge({"parts": found})
