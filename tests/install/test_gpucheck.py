"""`nvx gpucheck` with a stand-in for its program: whatever a part does, the file is whole and says so."""

import json
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from gpucheck_runs import ONE_GPU, PROGRAM_PARTS, STAND_IN, eventually, gone, script, states
from nvx.commands import gpucheck
from nvx.gpucheck import build, parts, probe, versions


def test_all_parts_run_in_their_order_and_pass(check, capsys):
    code, document, ran = check()
    assert code == 0
    assert ran == PROGRAM_PARTS == list(document["parts"])
    assert set(states(document).values()) == {"passed"}
    assert document["parts"]["facts"]["lines"][0] == {"part": "facts", "figure": 1.5}
    assert {"machine", "versions", "driver", "command", "when", "gpus", "targets"} <= set(document)
    assert all(target["state"] == "not measured" for target in document["targets"])
    told = capsys.readouterr().out
    assert "passed: facts, correct" in told and "target not measured: LL one-shot" in told


@pytest.mark.parametrize(
    ("how", "state", "why"),
    [
        ("fail", "failed", "all_reduce f32: wrong output"),
        ("segfault", "died", "SIGSEGV"),
        ("garbage", "failed", "no verdict: a last word"),
        ("liar", "failed", "code 3"),
        ("skip", "skipped", "no such thing here"),
        ("realtime", "died", f"of signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_part_that_goes_wrong_is_told_and_the_rest_run(check, how, state, why):
    code, document, ran = check({"streams": how})
    assert ran == PROGRAM_PARTS
    assert code == (0 if state == "skipped" else 1)
    found = document["parts"]["streams"]
    assert found["state"] == state and why in found["why"]
    assert len(json.dumps(found)) < 20_000
    assert {s for name, s in states(document).items() if name != "streams"} == {"passed"}


@pytest.mark.parametrize("part", ["processes", "bench", "copies"])
def test_lines_that_make_no_sense_do_not_end_the_run(check, part):
    code, document, ran = check({part: "odd"}, ["facts", "processes", "bench", "copies"])
    assert code == 0 and ran == list(document["parts"]) and set(states(document).values()) == {"passed"}
    assert {target["state"] for target in document["targets"]} == {"not measured"}
    assert [line[:8] for line in document["parts"][part]["said"]] == ["[[[[[[[[", '{"deep":']


def test_a_part_that_hangs_is_ended_with_all_it_started(check):
    began = time.monotonic()
    code, document, ran = check({"correct": "hang"}, ["facts", "correct", "streams"], limit=6)
    assert time.monotonic() - began < 25
    assert code == 1 and ran == ["facts", "correct", "streams"]
    assert states(document) == {"facts": "passed", "correct": "timed out", "streams": "passed"}
    child = document["parts"]["correct"]["lines"][1]["child"]
    assert eventually(lambda: gone(child))


def test_time_that_runs_out_is_kept_to(check):
    began = time.monotonic()
    code, document, ran = check({"facts": "hang"}, ["facts", "correct", "streams"], minutes=0.1)
    assert time.monotonic() - began < 20
    assert code == 1 and ran == ["facts"]
    assert states(document) == {"facts": "timed out", "correct": "skipped", "streams": "skipped"}
    assert document["parts"]["correct"]["why"] == "time ran out"


def test_parts_that_need_more_say_what_is_missing(check):
    _, document, ran = check(names=["pairs", "nccl", "memcheck", "racecheck", "symm_mem", "bench_processes"])
    assert ran == ["bench_processes"]  # the stand-in passes it; the real one asks for MPS itself
    why = {name: part["why"] for name, part in document["parts"].items()}
    assert why["pairs"] == why["nccl"] == "1 GPU here, it needs 2"
    assert why["memcheck"] == why["racecheck"] == "compute-sanitizer is not installed"
    assert "without MPS" in why["symm_mem"] and "nvidia-cuda-mps-control is not installed" in why["symm_mem"]


def test_what_a_sanitizer_finds_fails_the_part(check, monkeypatch):
    monkeypatch.setattr(parts, "sanitizer", lambda: str(STAND_IN))
    names = ["memcheck", "synccheck", "racecheck"]
    code, document, ran = check({"memcheck": "sanitizer", "racecheck": "sanitizer"}, names)
    assert code == 1 and ran == names
    assert document["parts"]["memcheck"]["why"] == "ERROR SUMMARY: 4 errors"
    assert document["parts"]["synccheck"]["state"] == "passed"
    assert document["parts"]["racecheck"]["why"] == "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def test_without_a_gpu_it_says_so_and_still_writes(monkeypatch, tmp_path, capsys):
    if probe.ask().gpus:
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    assert gpucheck.main([]) == 2
    told = capsys.readouterr().out
    assert told.startswith("nvx gpucheck: there is no GPU here: ") and told.count("\n") == 2
    document = json.loads((tmp_path / "gpucheck.json").read_text())
    assert {(part["state"], part["why"]) for part in document["parts"].values()} == {("skipped", "no GPU")}
    assert list(document["parts"]) == list(parts.NAMES)


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (802, "system not yet initialized", "802 (system not yet initialized): where switches join the GPUs, nvidia-f"),
        (999, None, "999"),
    ],
)
def test_a_driver_that_refuses_is_quoted(monkeypatch, tmp_path, code, text, told):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    answer = f'*text = "{text}"; return 0;' if text else "return 1;"
    source.write_text(
        f"int cuInit(unsigned flags) {{ return {code}; }}\n"
        f"int cuGetErrorString(int error, const char** text) {{ {answer} }}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], timeout=60, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    answer = probe.ask()
    assert answer.gpus == [] and answer.why.startswith(f"the driver refuses with code {told}")
    assert answer.in_short() == f"driver refused (code {code})"


def test_without_sources_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probe, "ask", lambda seconds=30: probe.Answer(ONE_GPU))
    monkeypatch.setattr(build, "is_source", lambda folder: False)
    assert gpucheck.main(["-J", str(tmp_path / "x.json")]) == 2
    assert "installed without them" in capsys.readouterr().err
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["parts"]["correct"]["why"] == "nothing was built"


def test_parts_whose_module_was_not_built_fail_with_the_reason(check, monkeypatch):
    built = build.Built({"program": str(STAND_IN)}, {"kernels": "work.cc: error: no"})
    monkeypatch.setattr(gpucheck.Check, "build", lambda self, computes: built)
    code, document, ran = check(names=["facts", "ddp", "staging"])
    assert code == 1 and ran == ["facts"]
    why = {name: (part["state"], part["why"]) for name, part in document["parts"].items()}
    assert why["ddp"] == ("failed", "work.cc: error: no") and why["staging"] == ("failed", "staged was not built")


def test_the_kind_of_memory_goes_to_the_parts_that_share_some():
    scene = parts.Scene({"program": "p"}, {}, 1, kind="host")
    asked = {
        part.name for part in parts.PARTS if part.kind == "program" and "--kind" in parts.command(part, scene, 9, True)
    }
    assert asked == {"processes", "killed", "bench_processes"}


def test_every_part_of_the_program_is_one_it_knows(root):
    listed = re.findall(r'\{"(\w+)", \w+\}', (root / "tests" / "gpu" / "main.cc").read_text())
    assert sorted(listed) == sorted([*PROGRAM_PARTS, "pairs"])


def test_limits_leave_time_for_the_build():
    """Every part may take all of its time: a call of each group keeps to nine minutes, the first with the build."""
    limits = {part.name: part.seconds for part in parts.PARTS}
    taken = {group: sum(limits[name] for name in names) for group, names in parts.GROUPS.items()}
    first = next(iter(taken))
    assert taken[first] + gpucheck.BUILDS <= 9 * 60, taken
    assert all(seconds <= 9 * 60 for seconds in taken.values()), taken


def test_groups_are_all_parts_in_their_order():
    names = [name for group in parts.GROUPS.values() for name in group]
    assert sorted(names) == sorted(parts.NAMES)
    assert all(list(group) == sorted(group, key=parts.NAMES.index) for group in parts.GROUPS.values())
    assert parts.expand(["facts", "device", "ddp"]) == [*parts.GROUPS["device"], "ddp"]


def test_what_only_a_device_can_tell_comes_first():
    assert parts.NAMES[:8] == ("facts", "correct", "streams", "absent", "abort", "killed", "processes", "graph")


def test_the_head_says_what_the_figures_stand_on(monkeypatch, tmp_path, root):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    script(nvcc, "echo 'Cuda compilation tools, release 13.0, V13.0.88'; echo 'Build cuda_13.0'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo 'c++ 12.2.0'; echo Copyright")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    told = versions.found(None)
    assert {"nvcc": "13.0.88", "compiler": "c++ 12.2.0", "cuda": "13.0", "nccl": "2.27.5"}.items() <= told.items()
    assert told["torch"] == torch.__version__
    assert told["nvx"] == re.search('"(.+)"', (root / "python" / "nvx" / "_version.py").read_text()).group(1)
    assert "commit" not in told
    script(nvcc, "exit 1")
    assert "nvcc" not in versions.found(None)


def test_the_head_says_which_sources_were_built(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("there is no git here")

    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        return subprocess.run(["git", "-C", str(tmp_path), *author, *words], capture_output=True, text=True, check=True)

    code = tmp_path / "csrc" / "x.cc"
    code.parent.mkdir()
    code.write_text("")
    assert versions.of_checkout(tmp_path) == {}
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert versions.of_checkout(tmp_path) == {"commit": commit, "dirty": False}
    assert versions.of_checkout(code.parent) == {}, "sources within a checkout of something else"
    (tmp_path / "found.json").write_text("a run's results")
    assert not versions.of_checkout(tmp_path)["dirty"]
    (code.parent / "new.cc").write_text("")
    assert versions.of_checkout(tmp_path)["dirty"]


def test_the_end_of_a_part_is_one_for_all_of_its_processes():
    scene = parts.Scene({"program": "p", "kernels": "k", "staged": "s"}, {}, 2)
    for part in parts.PARTS:
        began = time.monotonic()
        told = parts.command(part, scene, 100, False)
        if part.kind in ("worker", "torch"):
            assert began + 87 <= float(told[told.index("--until") + 1]) <= time.monotonic() + 89
        else:
            assert told[told.index("--seconds") + 1] == "88"


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        gpucheck.main(["--parts", "dance"])
    assert "no part 'dance'" in capsys.readouterr().err
