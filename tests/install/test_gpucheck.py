"""`nvx gpucheck` with a stand-in for its program: whatever a part does, the file is whole and says so."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from nvx.commands import gpucheck
from nvx.gpucheck import build, by_hand, judge, parts, probe, run, steps, table

STAND_IN = pathlib.Path(__file__).with_name("gpucheck_stand_in.py")
PROGRAM_PARTS = [part.name for part in parts.PARTS if part.kind == "program" and part.gpus == 1]
ONE_GPU = [{"name": "Imagined", "compute": "9.0"}]


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs the command in this process, on an imagined GPU: its exit code, its file, and the parts that were run."""
    monkeypatch.setattr(probe, "gpus", lambda: (ONE_GPU, ""))
    monkeypatch.setattr(parts, "sanitizer", lambda: None)
    monkeypatch.setattr(parts, "MPS_PLACES", ())
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin")
    log = tmp_path / "log"
    monkeypatch.setenv("NVX_STAND_IN_LOG", str(log))

    def go(how=None, names=PROGRAM_PARTS, minutes=9, limit=None):
        monkeypatch.setenv("NVX_STAND_IN", json.dumps(how or {}))
        if limit is not None:
            short = [part.__class__(**{**part.__dict__, "seconds": limit}) for part in parts.PARTS]
            monkeypatch.setattr(parts, "PARTS", tuple(short))
        file = tmp_path / "results" / "found.json"
        given = ["-J", str(file), "--program", str(STAND_IN), "--parts", ",".join(names), "--minutes", str(minutes)]
        code = gpucheck.main(given)
        ran = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
        return code, json.loads(file.read_text()), ran

    return go


def states(document):
    return {name: part["state"] for name, part in document["parts"].items()}


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


def test_a_part_that_hangs_is_ended_with_all_it_started(check):
    began = time.monotonic()
    code, document, ran = check({"correct": "hang"}, ["facts", "correct", "streams"], limit=6)
    assert time.monotonic() - began < 25
    assert code == 1 and ran == ["facts", "correct", "streams"]
    assert states(document) == {"facts": "passed", "correct": "timed out", "streams": "passed"}
    child = document["parts"]["correct"]["lines"][1]["child"]
    for _ in range(100):
        if not pathlib.Path(f"/proc/{child}").exists() or "Z" in pathlib.Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of a part that hung is still there")


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


def test_ctrl_c_leaves_the_file(tmp_path):
    """In a process of its own, which is interrupted while its second part hangs."""
    file = tmp_path / "found.json"
    code = (
        "import signal, sys\nfrom nvx.commands import gpucheck\nfrom nvx.gpucheck import probe\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin without it
        f"probe.gpus = lambda: ({ONE_GPU!r}, '')\n"
        f"sys.exit(gpucheck.main(['-J', {str(file)!r}, '--program', {str(STAND_IN)!r},"
        " '--parts', 'facts,correct,streams']))"
    )
    environment = os.environ | {"NVX_STAND_IN": '{"correct": "hang"}', "NVX_STAND_IN_LOG": str(tmp_path / "log")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "log"
    end = time.monotonic() + 60
    while not (log.exists() and "correct" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130, told
    document = json.loads(file.read_text())
    assert states(document) == {"facts": "passed", "correct": "interrupted", "streams": "skipped"}
    assert document["parts"]["streams"]["why"] == "interrupted"


def test_without_a_gpu_it_says_so_and_still_writes(monkeypatch, tmp_path, capsys):
    if probe.gpus()[0]:
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
    gpus, why = probe.gpus()
    assert gpus == [] and why.startswith(f"the driver refuses with code {told}")


def test_without_sources_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probe, "gpus", lambda: (ONE_GPU, ""))
    monkeypatch.setattr(build, "is_source", lambda folder: False)
    assert gpucheck.main(["-J", str(tmp_path / "x.json")]) == 2
    assert "installed without them" in capsys.readouterr().err
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["parts"]["correct"]["why"] == "nothing was built"


def test_a_build_that_fails_is_a_sentence(monkeypatch, tmp_path, capsys, root):
    monkeypatch.setattr(probe, "gpus", lambda: (ONE_GPU, ""))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'nvcc: error: broken'\nexit 1\n")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no CMake either, so the compilers are called by hand
    monkeypatch.setenv("CXX", shutil.which("true", path="/usr/bin:/bin"))
    given = ["-J", str(tmp_path / "x.json"), "--source", str(root), "--build-dir", str(tmp_path / "b")]
    assert gpucheck.main(given) == 1
    assert "failed: nvcc: error: broken; the log is" in capsys.readouterr().err
    assert "failed" in json.loads((tmp_path / "x.json").read_text())["build"]


def eventually(happens, seconds=20):
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


def gone(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_build_that_is_late_leaves_nothing_running(tmp_path):
    slow = tmp_path / "compiler"
    slow.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/child\nwait\n")
    slow.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(steps.BuildError, match="compiling was not done in time"):
        steps.Steps(tmp_path / "log", 2).run([str(slow)], "compiling")
    assert time.monotonic() - began < 20
    assert eventually(lambda: gone(int((tmp_path / "child").read_text())))


def test_a_build_that_is_stopped_begins_nothing_more(tmp_path):
    going = steps.Steps(tmp_path / "log", 600)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(going.run, ["sleep", "600"], "compiling")
        assert eventually(lambda: going.running)
        going.stop()
        with pytest.raises(steps.BuildError, match="compiling failed"):
            late.result(timeout=20)
    with pytest.raises(steps.BuildError, match="was stopped"):
        going.run(["true"], "linking")


def test_what_cannot_be_built_leaves_the_rest(tmp_path, monkeypatch):
    """By hand: a file of the modules alone that does not compile."""
    tool = tmp_path / "tool"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *wrong.cc*) echo "wrong.cc: error: no"; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done; echo made > "$2"\n'
    )
    tool.chmod(0o755)
    files = [("wrong", {"kernels", "staged"}), ("right", {"program", "kernels", "staged"})]
    objects = [
        by_hand.Object([str(tool), f"{name}.cc", "-o", str(tmp_path / name)], tmp_path / name, frozenset(within))
        for name, within in files
    ]
    monkeypatch.setattr(by_hand, "list_objects", lambda job: objects)
    wanted = {what: tmp_path / "built" / what for what in ("program", "kernels", "staged")}
    job = by_hand.Job(tmp_path, tmp_path, tool, tmp_path, ["9.0"], wanted)
    missing = by_hand.compile_all(job, steps.Steps(tmp_path / "log", 60))
    assert set(missing) == {"kernels", "staged"} and "wrong.cc: error: no" in missing["staged"]
    assert wanted["program"].exists() and not wanted["kernels"].exists()


def compiled(command, file, root):
    """What decides an object, of each file in it: the file and, of the flags, those that by_hand has to repeat."""
    repeated = re.compile(r"-std=(?:c|gnu)\+\+20|-ffp-contract=.*|-march=.*|-fvisibility.*|-fPIC")
    names = [word.split("=")[0] for word in command if re.match(r"-D(?!NDEBUG|_FORTIFY_SOURCE|_C_EXPORTS)", word)]
    ahead = ["csrc/" + word.removeprefix("--include=") for word in command if word.startswith("--include=")]
    flags = tuple(sorted(word for word in command if repeated.fullmatch(word)))
    return [(place, flags, frozenset(names)) for place in (*ahead, pathlib.Path(file).relative_to(root).as_posix())]


@pytest.mark.parametrize("ucx", [False, True])
def test_by_hand_it_compiles_what_cmake_does(tmp_path, root, ucx):
    """The module without kernels: for the rest CMake wants an nvcc."""
    if shutil.which("cmake") is None:
        pytest.skip("there is no CMake here")
    headers = by_hand.find_ucx()
    if ucx and headers is None:
        pytest.skip("there are no headers of UCX here")
    options = ["NVX_PYTHON=ON", f"NVX_UCX={'ON' if ucx else 'OFF'}", "CMAKE_BUILD_TYPE=Release"]
    options += [f"Python_EXECUTABLE={sys.executable}", f"NVX_OUTPUT_DIR={tmp_path / 'module'}"]
    configure = ["cmake", "-S", str(root), "-B", str(tmp_path / "cmake"), *(f"-D{option}" for option in options)]
    subprocess.run(configure, capture_output=True, text=True, timeout=300, check=True)
    entries = json.loads((tmp_path / "cmake" / "compile_commands.json").read_text())
    by_cmake = {one for entry in entries for one in compiled(entry["command"].split(), entry["file"], root)}
    wanted = {"staged": tmp_path / "module" / "_C.so"}
    job = by_hand.Job(root, tmp_path, None, None, [], wanted, headers if ucx else None)
    objects = [one.command for one in by_hand.list_objects(job) if "staged" in one.within]
    files = [one for command in objects for one in compiled(command, command[command.index("-c") + 1], root)]
    assert len(files) == len(set(files))
    stub = {one for one in files if one[0] == "csrc/stubs/no_ucx.cc"}
    assert bool(stub) != ucx
    found = set(files)
    assert {what[:2] for what in found} == {what[:2] for what in by_cmake}
    named = {what[:2]: what[2] for what in found}
    assert {file: missing for file, flags, names in by_cmake if (missing := names - named[file, flags])} == {}


def test_which_headers_of_ucx_do(tmp_path, monkeypatch):
    def headers(name, major, minor):
        folder = tmp_path / name / "include" / "ucp" / "api"
        folder.mkdir(parents=True)
        version = f"#define UCP_API_MAJOR   {major}\n#define UCP_API_MINOR   {minor}\n"
        (folder / "ucp_version.h").write_text(version)
        return tmp_path / name

    monkeypatch.setenv("UCX_HOME", str(headers("old", 1, 9)))
    monkeypatch.setenv("HPCX_UCX_DIR", str(headers("new", 1, 13)))
    assert by_hand.find_ucx() == tmp_path / "new" / "include"
    monkeypatch.setenv("UCX_HOME", str(headers("newer", 2, 0)))
    assert by_hand.find_ucx() == tmp_path / "newer" / "include"


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


def test_mps_is_within_a_parts_time(check, monkeypatch, tmp_path):
    """One that takes for ever to start costs a third of the limit, and the part runs without it."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexec sleep 600\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    code, document, ran = check({}, ["bench_processes"], limit=9)
    assert time.monotonic() - began < 20
    found = document["parts"]["bench_processes"]
    assert code == 0 and ran == ["bench_processes"] and 0 < found["limit"] <= 6.1
    assert "timed out" in document["mps"]


def test_mps_is_found_where_the_driver_puts_it(check, monkeypatch, tmp_path):
    """Which may be a folder that PATH does not name."""
    control, log = tmp_path / parts.MPS_CONTROL, tmp_path / "asked"
    control.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    control.chmod(0o755)
    assert parts.mps_control() is None
    monkeypatch.setattr(parts, "MPS_PLACES", ("/nowhere", str(tmp_path)))
    assert parts.mps_control() == str(control)
    code, document, _ = check({}, ["bench_processes"])
    assert code == 0 and document["parts"]["bench_processes"]["mps"] and log.read_text().startswith("-d\n")


def test_what_was_built_is_used_and_else_built(check, monkeypatch, tmp_path, capsys):
    """A machine may have been given back, with all that was built on it, since the last call."""
    built = []

    def make(source, folder, computes, seconds):
        built.append(folder)
        folder.mkdir(exist_ok=True)
        (folder / build.NAME).symlink_to(STAND_IN)
        found = build.Built()
        found.add("program", folder)
        return found

    monkeypatch.setattr(build, "build", make)
    folder = tmp_path / "built"
    for turn in range(2):
        given = ["-J", str(tmp_path / "x.json"), "--build-dir", str(folder), "--no-build", "--parts", "facts"]
        assert gpucheck.main(given) == 0
        assert json.loads((tmp_path / "x.json").read_text())["parts"]["facts"]["state"] == "passed"
        assert built == [folder]
        assert ("--no-build, but nothing is built in" in capsys.readouterr().out) == (turn == 0)


def test_every_part_of_the_program_is_one_it_knows(root):
    listed = re.findall(r'\{"(\w+)", \w+\}', (root / "tests" / "gpucheck" / "main.cc").read_text())
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


# ---- what is made of the figures


def bench_line(algorithm, size, us, ranks=8, blocks=4):
    return {
        "bench": "all_reduce", "algorithm": algorithm, "ranks": ranks, "blocks": blocks, "bytes": size, "launch_us": us,
        "inside_us": us / 2,
    }  # fmt: skip


def rounds_line(two, blocks=4):
    return {
        "control": "flag_round", "ranks": 8, "blocks": blocks, "launch_0_us": 2.0, "launch_2_us": two, "round_us": 1.0
    }  # fmt: skip


def document_of(**lines):
    outcome = {part: run.Outcome("passed", lines=found).as_json() for part, found in lines.items()}
    return {"parts": outcome, "targets": [], "command": "nvx gpucheck", "when": "now", "versions": {}}


START = {"start": "processes", "ranks": 8, "arena_bytes": 64 << 20, "init_ms": 90.0}
COPY = {"copy": "device_to_device", "bytes": 256 << 20, "us": 150.0, "gb_s": 1800.0}


def verdicts(document, *checks):
    return [check(document).state for check in checks]


FUSED = (judge._one_shot, judge._two_shot, judge._arena, judge._init)


def test_targets_are_judged():
    fast = [rounds_line(6.0), rounds_line(9.0, 8), *(bench_line("one_shot", n, 5.0) for n in (8, 1024, 16 << 10))]
    ideal_us = judge.moved_bytes(16 << 20, 8)[0] / (2 * 1800e9) * 1e6
    chunks = [bench_line("chunks", 16 << 20, ideal_us / 0.85), bench_line("chunks", 16 << 20, 9e9, blocks=8)]
    good = document_of(bench=fast + chunks, copies=[COPY], processes=[START])
    assert verdicts(good, *FUSED) == ["met"] * 4
    slow = [rounds_line(6.0), bench_line("one_shot", 8, 5.0), bench_line("one_shot", 16 << 10, 6.1)]
    chunks = [bench_line("chunks", 16 << 20, ideal_us / 0.75)]
    late = START | {"init_ms": 201.0, "arena_bytes": (64 << 20) + 1}
    assert verdicts(document_of(bench=slow + chunks, copies=[COPY], processes=[START, late]), *FUSED) == ["missed"] * 4
    nothing = document_of(bench=slow[:2], processes=[])
    assert {verdict.state for verdict in judge.judge(nothing)} == {"not measured"}


def test_processes_under_mps_are_judged_beside_torchs():
    def judged(ours, theirs, mps=True, ranks=8):
        sizes = (64, 4096, 16 << 10, 64 << 10)
        found = {
            part: [bench_line("one_shot", n, us, ranks) for n, us in zip(sizes, times, strict=False)]
            for part, times in (("bench_processes", ours), ("symm_mem", theirs))
        }
        found["symm_mem"] += [bench_line("two_shot", n, 0.1, ranks) for n in sizes]
        document = document_of(**found)
        for part in document["parts"].values():
            part["mps"] = mps
        return judge._under_mps(document)

    assert judged((5, 5, 5, 99), (6, 6, 6, 6)).state == "met"  # beyond 16 KiB nothing was promised
    missed = judged((5, 6.5, 5), (6, 6, 6))
    assert missed.state == "missed" and missed.measured == "6.50 us at 4096 B, torch's 6.00 us"
    assert judged((6, 5, 5), (6, 6, 6)).state == "missed"
    assert judged((5, 5, 5), (6, 6, 6), mps=False).state == "not measured"
    assert judged((5, 5), (6, 6, 6)).state == "not measured"
    assert judged((5, 5, 5), (6, 6, 6), ranks=4).state == "not measured"


def test_the_hosts_time_is_judged():
    lines = [{"host": "an empty launch", "us": 2.0}, {"host": "all_reduce", "us": 5.9, "over_launch_us": 3.9}]
    met = judge._host_time(document_of(host_time=lines))
    assert met.state == "met" and met.measured == "3.90 us: all_reduce"
    slow = {"host": "broadcast", "us": 6.0, "over_launch_us": 4.0}
    document = document_of(host_time=[*lines, slow])
    assert verdicts(document, judge._host_time) == ["missed"]
    document["parts"]["host_time"]["state"] = "failed"
    assert verdicts(document, judge._host_time) == ["not measured"]


def test_replays_are_judged_beside_torchs():
    def judged(ours, theirs, **more):
        found = {
            part: [{"replayed": "all_reduce", "ranks": 2, "bytes": n, "us": us} | more for n, us in times.items()]
            for part, times in (("replay_time", ours), ("symm_mem", theirs))
        }
        document = document_of(**found)
        return judge._replayed(document), table.markdown(document)

    verdict, text = judged({64: 5.0, 4096: 6.0}, {64: 5.0, 1 << 20: 1.0})
    assert verdict.state == "met" and "| 2 | 64 B | 5.0 | 5.0 |" in text and "| 2 | 1 MiB | - | 1.0 |" in text
    verdict, _ = judged({64: 5.0, 4096: 6.1}, {64: 5.0, 4096: 6.0})
    assert verdict.state == "missed" and verdict.measured == "6.10 us at 4096 B, torch's 6.00 us"
    assert judged({64: 5.0}, {4096: 6.0})[0].state == "not measured"
    assert judged({64: 5.0}, {64: 6.0}, ranks=8)[0].state == "not measured"
    assert verdicts(document_of(), judge._replayed) == ["not measured"]


def test_a_step_is_judged_beside_gloos():
    def judged(nvx, gloo, copies=(), gpus=ONE_GPU, **more):
        step = {"step": "DDP", "ranks": 2, "gradient_bytes": 10_000_000, "nvx_ms": nvx, "gloo_ms": gloo} | more
        return judge._step(document_of(training=[step], copies=list(copies)) | {"gpus": gpus})

    ways = [{"copy": way, "bytes": 16 << 20, "gb_s": 10.0} for way in ("device_to_host", "host_to_device")]
    ways += [{"copy": "device_to_host", "bytes": 8, "gb_s": 0.1}]
    assert judged(3.0, 5.0, ways).state == "met" and "the copies are 2.00 ms" in judged(3.0, 5.0, ways).measured
    assert judged(3.1, 5.0, ways).state == "missed"
    assert judged(4.9, 5.0).state == "met" and "were not measured" in judged(4.9, 5.0).measured
    assert judged(5.0, 5.0).state == "missed"
    assert judged(3.0, 5.0, ranks=4).state == judged(3.0, 5.0, gpus=ONE_GPU * 2).state == "not measured"
    assert verdicts(document_of(), judge._step) == ["not measured"]


def test_what_an_all_reduce_moves():
    assert judge.moved_bytes(800, 1) == (1600.0, 1600.0)  # read once, written once
    assert judge.moved_bytes(800, 8) == (800 * 8 * 5.5, 800 * 16.0)


def test_the_tables_show_every_figure(tmp_path, capsys):
    facts = [{"gpu": 0, "name": "Imagined", "processors": 132}]
    torchs = [bench_line("one_shot", 1024, 11.0, ranks=2), bench_line("two_shot", 1024, 12.0, ranks=2)]
    document = document_of(facts=facts, bench=[rounds_line(6.0), bench_line("one_shot", 1024, 4.321)], symm_mem=torchs)
    document["targets"] = [verdict.as_json() for verdict in judge.judge(document)]
    text = table.markdown(document)
    assert "Imagined (132 processors)" in text
    assert "| 1 KiB | 4.3 (4) | - | - | 2.2 | - |" in text
    assert "| 2 | 1 KiB | 11.0 | 12.0 |" in text
    assert "of 2 6.0 us" in text
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document | {"schema": 1, "what": "gpucheck"}))
    assert gpucheck.main(["--table", str(file)]) == 0
    assert capsys.readouterr().out.strip() == text
    file.write_text(json.dumps(document | {"schema": 1, "what": "targets"}))
    assert gpucheck.main(["--table", str(file)]) == 2


def test_files_of_several_calls_are_judged_together(tmp_path, capsys):
    head = {"schema": 1, "what": "gpucheck", "gpus": ONE_GPU, "driver": "1", "minutes": 4.0}
    calls = [{"host": "all_reduce", "us": 5.9, "over_launch_us": 3.9}]
    skipped = run.Outcome("skipped", "time ran out").as_json()
    first, again = document_of(host_time=calls, facts=[]) | head, document_of(processes=[START], correct=[]) | head
    first["parts"]["correct"], again["parts"]["facts"] = skipped, skipped
    files = [tmp_path / "first.json", tmp_path / "again.json"]

    def table_of(*documents):
        for file, document in zip(files, documents, strict=True):
            file.write_text(json.dumps(document))
        return gpucheck.main(["--table", *map(str, files), "-J", str(tmp_path / "whole.json")])

    assert table_of(again, first) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert list(whole["parts"]) == ["facts", "correct", "processes", "host_time"]
    assert set(states(whole).values()) == {"passed"} and whole["minutes"] == 8.0
    assert [target["state"] for target in whole["targets"]].count("met") == 3
    assert "| set-up beyond CUDA's own: under 200 ms | met |" in capsys.readouterr().out
    assert table_of(first, again | {"driver": "2"}) == 2
    assert "differ in their driver: 1 and 2" in capsys.readouterr().err


def test_the_tables_of_torchs_parts():
    training = [
        {"step": "DDP", "ranks": 2, "gradient_bytes": 16 << 20, "nvx_ms": 3.21, "gloo_ms": 40.0, "alone_ms": 2.5}
    ]
    host = [{"host": "an empty launch", "us": 2.0}, {"host": "all_reduce", "us": 7.5, "over_launch_us": 5.5}]
    seen = {"cudaLaunchKernel": 20, "cudaEventRecord": 40}
    profile = [{"profile": "all_reduce", "calls": 20, "seen": seen, "device_allocations": 0}]
    graphs = [{"graphs": 4000, "served": ["all_reduce"], "refused": {"broadcast": "not yet"}}]
    line = {"pool": "all_gather", "piece_bytes": 1 << 20, "direct_pieces": 2, "staging_bytes_saved": 2 << 20}
    pools = [line | {"ordinary_ms": 1.5, "pool_ms": 1.25}, {"pool": "FSDP2, 4 steps", "direct_pieces": 9}]
    document = document_of(training=training, host_time=host, profile=profile, replay=graphs, pools=pools)
    document["targets"] = [verdict.as_json() for verdict in judge.judge(document)]
    assert judge._calls(document).state == "met"
    text = table.markdown(document)
    assert "| kernels | 2 | 16 MiB | 3.2 | 40.0 | 2.5 |" in text
    assert "| all_reduce | 7.5 | 5.5 | 2 cudaEventRecord, 1 cudaLaunchKernel |" in text
    assert "| 3 KiB | all_reduce | broadcast: not yet |" in text
    assert re.search(r"\| all_gather \| 1 MiB \| 2 MiB \| 1.5\d* \| 1.2\d* \|", text), text
    document["parts"]["profile"] |= {"state": "failed", "why": "20 calls waited"}
    assert judge._calls(document).state == "missed"


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        gpucheck.main(["--parts", "dance"])
    assert "no part 'dance'" in capsys.readouterr().err
