"""What `nvx gpucheck` builds, with CMake and by hand, and what is left when that is late or goes wrong."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpucheck_runs import ONE_GPU, STAND_IN, eventually, gone, script, states
from nvx.commands import gpucheck
from nvx.gpucheck import build, by_hand, probe, run, steps


def test_a_build_that_fails_is_a_sentence(monkeypatch, tmp_path, capsys, root):
    monkeypatch.setattr(probe, "ask", lambda seconds=30: probe.Answer(ONE_GPU))
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
    assert gpucheck.main([*given, "--parts", "facts,staging"]) == 1
    assert "failed: nvcc: error: broken; the log is" in capsys.readouterr().err
    assert "failed" in json.loads((tmp_path / "x.json").read_text())["build"]


@pytest.fixture
def bare_nvcc(monkeypatch, tmp_path):
    """One that lies in no toolkit, or does not even answer."""
    folder = tmp_path / "toolkit" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(folder.parent))
    monkeypatch.setattr(build, "TOOLKIT", tmp_path / "nowhere")
    return lambda text: script(folder / "nvcc", text)


@pytest.mark.parametrize(("text", "why"), [("exit 1", "no cuda_runtime_api.h beside it"), ("", "Exec format error")])
def test_an_nvcc_of_no_use_costs_only_what_needs_it(bare_nvcc, monkeypatch, tmp_path, root, text, why):
    nvcc = bare_nvcc(text)
    if not text:
        nvcc.write_bytes(b"\0")
    asked = []
    monkeypatch.setattr(build, "configure", lambda source, folder, toolkit, *more: asked.append(toolkit) or True)
    monkeypatch.setattr(build, "by_cmake", lambda folder, targets, going: {what: "no" for what in targets})
    built = build.build(root, tmp_path / "built", ["9.0"], 60)
    assert asked == [None] and built.found == {}
    assert why in built.missing["program"] and why in built.missing["kernels"] and built.missing["staged"] == "no"


@pytest.mark.parametrize("how", ["a build that fails", "a folder that cannot be written"])
def test_without_a_build_what_needs_none_is_run(check, monkeypatch, tmp_path, capsys, root, how):
    named = tmp_path / "taken"
    named.touch()
    if how == "a build that fails":
        monkeypatch.setattr(build, "build", lambda *given: build.Built({}, {what: "broken" for what in build.TARGETS}))
    ran = []

    def start(command, seconds, environment):
        ran.append(command)
        return run.Outcome("passed")

    monkeypatch.setattr(run, "run", start)
    given = ["-J", str(tmp_path / "x.json"), "--source", str(root), "--build-dir", str(named / "within")]
    assert gpucheck.main([*given, "--parts", "facts,ddp,gloo"]) == 1
    document = json.loads((tmp_path / "x.json").read_text())
    assert states(document) == {"facts": "failed", "ddp": "failed", "gloo": "passed"} and len(ran) == 1
    why = document["parts"]["facts"]["why"]
    assert why == document["build"]["failed"] == document["build"]["missing"]["program"]
    assert why == "broken" or f"{named / 'within'} cannot be written" in why or "there is no nvcc" in why
    assert "nothing was built" in capsys.readouterr().err


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


def late(folder, command):
    """A build that is over once its job has begun, of which the one that was called dies as soon as it is asked to."""
    going = steps.Steps(folder / "log", 600)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(going.run, ["sh", "-c", f"{command} & wait"], "compiling")
        assert eventually(lambda: (folder / "job").exists() and (folder / "job").read_text().endswith("\n"))
        going.stop()
        with pytest.raises(steps.BuildError, match="compiling failed"):
            done.result(timeout=60)


def test_who_ends_its_jobs_is_given_time_for_it(tmp_path):
    """cmake dies at once of what it hands on to ninja."""
    tidies = f"trap 'sleep 0.5; touch {tmp_path}/tidied; exit' TERM; echo $$ > {tmp_path}/job; sleep 600 & wait"
    late(tmp_path, str(script(tmp_path / "tidies", tidies)))
    assert (tmp_path / "tidied").exists()


def test_jobs_of_ninja_do_not_outlive_a_late_build(tmp_path):
    """They have groups of their own, and one of them does not end when it is asked to."""
    ninja = shutil.which("ninja")
    if ninja is None:
        pytest.skip("there is no ninja here")
    deaf = script(tmp_path / "deaf", f"trap '' TERM; echo $$ > {tmp_path}/job; sleep 600; echo")
    (tmp_path / "build.ninja").write_text(f"rule deaf\n  command = {deaf}\nbuild made: deaf\n")
    late(tmp_path, f"{ninja} -C {tmp_path}")
    assert eventually(lambda: gone(int((tmp_path / "job").read_text())))


@pytest.fixture
def compile_by_hand(tmp_path, monkeypatch):
    """Compiles what is named, each for the targets that are; a tool that does what the names say."""
    tool = script(
        tmp_path / "tool",
        'case "$*" in *wrong.cc*) echo "wrong.cc: error: no"; exit 1;; *slow.cc*) sleep 600;; esac\n'
        f'while [ "$1" != -o ]; do shift; done; echo "${{2##*/}}" >> {tmp_path}/made; echo made > "$2"',
    )

    def go(stop_at=None, **files):
        objects = [
            by_hand.Object([str(tool), f"{name}.cc", "-o", str(tmp_path / name)], tmp_path / name, frozenset(within))
            for name, within in files.items()
        ]
        monkeypatch.setattr(by_hand, "list_objects", lambda job: objects)
        monkeypatch.setattr(by_hand, "find_compiler", lambda: str(tool))
        wanted = {what: tmp_path / "built" / what for what in ("program", "kernels", "staged")}
        job = by_hand.Job(tmp_path, tmp_path, tool, tmp_path, ["9.0"], wanted)
        going = steps.Steps(tmp_path / "log", 600)
        with ThreadPoolExecutor() as pool:
            if stop_at:
                pool.submit(lambda: (eventually(wanted[stop_at].exists), going.stop()))
            missing = by_hand.compile_all(job, going, at_once=1)
        return missing, [what for what, file in wanted.items() if file.exists()]

    return go


def test_a_late_build_by_hand_gives_what_it_came_to(compile_by_hand, tmp_path):
    """The program first, though torch's files were named before its own."""
    modules = {"kernels", "staged"}
    files = {"slow": modules, "torch": modules, "all": {"program", *modules}, "own": {"program"}}
    missing, there = compile_by_hand(stop_at="program", **files)
    assert there == ["program"] and set(missing) == modules and "compiling slow failed" in missing["staged"]
    assert (tmp_path / "made").read_text().split()[:3] == ["all", "own", "program"]


def test_what_cannot_be_built_leaves_the_rest(compile_by_hand):
    """By hand: a file of the modules alone that does not compile."""
    missing, there = compile_by_hand(wrong={"kernels", "staged"}, right={"program", "kernels", "staged"})
    assert set(missing) == {"kernels", "staged"} and "wrong.cc: error: no" in missing["staged"]
    assert there == ["program"]


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
