#!/usr/bin/env python3
"""Runs what needs a GPU, the most important first, each part under a time limit, and writes one JSON as it goes.

    scripts/gpu_evidence.py --bundle build/gpu_bundle              # beforehand, with nvcc and a package index, no GPU
    scripts/gpu_evidence.py --from build/gpu_bundle -J found.json  # on the machine with the GPU, without a network
    scripts/gpu_evidence.py --dry-run                              # without a GPU: on simulated devices

Called again with the same file it goes on where it ended. docs/gpu-evidence.md describes the parts and the file."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "nvx_gpu"
JOBS = str(len(os.sched_getaffinity(0)))  # without a number, make starts all compilers at once
SIMULATED_TOOLS = ROOT / "tests" / "gpu" / "tools"
KERNELS = ["-DNVX_CUDA=ON", "-DNVX_GPU_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
WHEELS = ("libucx-cu13", "pytest", "pluggy", "iniconfig", "packaging")  # in addition to torch, CMake and nvcc
KEPT = ("passed", "failed", "timed out", "died")  # states of parts that a further call does not run again
MPS = "nvidia-cuda-mps-control"
TESTED = re.compile(r"::(\S.*?) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?\s*(?:\[ *\d+%\])?$")
VERSIONS = """import json, torch; cuda = torch.version.cuda
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "nccl": torch.cuda.nccl.version() if cuda else None}))"""


class NotRun(Exception): ...  # a part has not run, or not to its end; the arguments are its state and the reason


@dataclasses.dataclass
class Outcome:
    state: str  # passed, failed, skipped, timed out, died, interrupted
    why: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    output: str = ""
    mps: bool = False


def start(command: list[str], out: Any, env: dict[str, str]) -> subprocess.Popen:
    """Starts the command in its own session. The kernel kills it when this process ends for any reason."""
    me = os.getpid()

    def with_me() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != me:
            os._exit(1)

    how = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT, "cwd": ROOT}
    return subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=with_me, **how)


def end(process: subprocess.Popen) -> None:
    """Kills the process and its session. A process that is stuck in the driver cannot be killed and stays."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == process.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def ends(process: subprocess.Popen, limit: float, look: Callable[[], None]) -> bool:
    """Waits for the process until the limit, an instant of the monotonic clock. `look` may raise."""
    while process.poll() is None:
        look()
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def run(command: list[str], seconds: float, env: dict, look=lambda: None, leave: bool = False) -> Outcome:
    """Runs the command for at most `seconds`, then kills its session unless `leave` is set."""
    began, state, why = time.monotonic(), "", ""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        try:
            process = start(command, out, env)
        except OSError as error:
            return Outcome("skipped", f"{command[0]} cannot be started: {error.strerror}")
        try:
            if not ends(process, began + seconds, look):
                state, why = "timed out", f"it had not ended in {seconds:.0f} s"
        except NotRun as stopped:
            state, why = stopped.args
        finally:
            if not leave or state:
                end(process)
        out.seek(0)
        text = out.read()
    if not state:
        code = process.returncode
        state = "passed" if code == 0 else "died" if code < 0 else "failed"
        why = "" if code == 0 else f"of signal {-code}" if code < 0 else f"it ended with code {code}"
    return read(Outcome(state, why, round(time.monotonic() - began, 2)), text)


def read(outcome: Outcome, text: str) -> Outcome:
    """Collects the rows in the output: JSON objects, and pytest's lines."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if line.startswith("{"):
                outcome.rows.append(json.loads(line))
                continue
        if tested := TESTED.search(line):
            reason = {"why": tested[3]} if tested[3] else {}
            outcome.rows.append({"test": tested[1], "state": tested[2].lower()} | reason)
        else:
            lines.append(line)
    outcome.output = "\n".join(lines).replace(str(ROOT), ".")[-4000:]
    tried = [row for row in outcome.rows if "end" in row or "test" in row]
    if outcome.state == "passed" and {row.get("end", row.get("state")) for row in tried} == {"skipped"}:
        outcome.state, outcome.why = "skipped", tried[0].get("why", "")
    elif outcome.state == "failed":
        wrong = [row for row in outcome.rows if "failed" in row and "why" in row]
        outcome.why += "".join(f"; {row['failed']}: {row['why']}" for row in wrong[:3])
    return outcome


class Part(NamedTuple):
    name: str
    group: str
    seconds: float  # the time limit
    kind: str  # program; tests, bench: of the torch module; tool
    words: str
    dry: str = ""  # for a dry run: additional words, or other words for tests
    together: bool = False  # its processes run on the GPU concurrently, under MPS
    gpus: int = 1  # the fewest that it needs
    under: str = ""  # the program runs under this command


MODULE = ("tests", "bench")  # the kinds of parts that need torch's module
FEW, SOON, BRIEF = "--ranks 2 --seconds 4", "--seconds 4", "--blocks 1 --iters 2"
LEAN, SANITIZER = "correct --lean --ranks 2", "compute-sanitizer --error-exitcode 9 --tool"
EACH = "-n GPUS --vs nccl -m 20 -G"
TWO = "two_ranks and (ddp or replay or pools or messages) and not compile"
TWO_DRY = "(first_use and ddp) or graphs_and_calls or pools_beside or messages_both_ways"
WIDE = "all_reduce --sizes 8,1K,16K,64K,256K,1M,4M,16M,64M"
PARTS = (
    Part("nvidia_smi", "facts", 20, "tool", "nvidia-smi -q"),
    Part("driver", "facts", 20, "tool", "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"),
    Part("mps", "facts", 10, "tool", f"sh -c 'command -v {MPS} || echo not here'"),
    Part("facts", "facts", 30, "program", "facts"),
    Part("versions", "facts", 60, "tool", shlex.join([sys.executable, "-c", VERSIONS])),
    Part("correct_few", "kernels", 60, "program", "correct --lean --ranks 2,3", SOON),
    Part("streams", "kernels", 30, "program", "streams", FEW),
    Part("absent", "kernels", 30, "program", "absent", f"{FEW} --patience 200"),
    Part("abort", "kernels", 25, "program", "abort", FEW),
    Part("graph", "kernels", 20, "program", "graph", FEW),
    Part("product", "kernels", 75, "program", "product", FEW),
    Part("host_calls", "kernels", 20, "program", "host_calls", FEW),
    Part("two_processes", "kernels", 45, "program", "processes --ranks 2", "--seconds 30"),
    Part("killed", "kernels", 35, "program", "killed", "--seconds 30"),
    Part("pairs", "links", 40, "program", "pairs", FEW),
    Part("one_each", "links", 150, "bench", f"{WIDE},256M,1G {EACH}", f"{BRIEF} --sizes 8 -n 2", gpus=2),
    Part("torch_two_ranks", "torch", 150, "tests", TWO, TWO_DRY),
    Part("torch_calls", "torch", 60, "tests", "profile or host_time", "calls_by_kernels or host_times"),
    Part("torch_fsdp2", "torch", 90, "tests", "four_ranks and fsdp2", "first_use and fsdp2"),
    Part("torch_sharded", "torch", 90, "tests", "three or fsdp1", "first_use and dtensor"),
    Part("torch_dtensor", "torch", 90, "tests", "four and dtensor", "first_use and dtensor"),
    Part("torch_compile", "torch", 120, "tests", "compile", "compiled"),
    Part("torch_places", "torch", 90, "tests", "expandable or visible or between_hosts", "proxies_by"),
    Part("torch_staged", "torch", 60, "tests", "staged", "staging"),
    Part("memcheck", "sanitizers", 45, "program", LEAN, SOON, under=f"{SANITIZER} memcheck"),
    Part("synccheck", "sanitizers", 45, "program", LEAN, SOON, under=f"{SANITIZER} synccheck"),
    Part("symm_mem_graphs", "compare", 75, "bench", f"{WIDE} --vs symm_mem -m 20 -G", BRIEF, True, 2),
    Part("symm_mem_8", "compare", 60, "bench", "all_reduce -n 8 --sizes 64,4K,16K --vs symm_mem", BRIEF, True, 8),
    Part("gloo", "compare", 60, "bench", "all_reduce --sizes 64,16K,1M,16M --vs gloo", BRIEF, True),
    Part("train", "compare", 60, "bench", "train --kinds ddp --vs gloo --iters 10", "--iters 1 --blocks 1", True),
    Part("slowed", "compare", 60, "bench", "overlap --vs gloo --side 2048", "--side 32 -b 64K --iters 2", True),
    Part("holds", "compare", 60, "bench", "memory --groups 4 --idle 0.5"),
    Part("bench_processes", "compare", 60, "program", "bench_processes --together", "--ranks 2 --seconds 12", True),
    Part("bench", "more", 70, "program", "bench", FEW),
    Part("copies", "more", 20, "program", "copies", FEW),
    Part("correct", "more", 60, "program", "correct", f"--lean {FEW}"),
    Part("processes", "more", 60, "program", "processes", "--ranks 2 --seconds 30"),
    Part("ptx", "more", 60, "program", LEAN, SOON, under="env CUDA_FORCE_PTX_JIT=1 CUDA_CACHE_DISABLE=1"),
)
NAMES = [part.name for part in PARTS]


class Run:
    """One call of the script: the tools of its parts, and the results file. `dry`: on the simulated device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given, self.file = arguments, Path(arguments.json).absolute()
        self.folder, self.dry = arguments.folder.absolute(), arguments.dry_run
        self.signals: list[int] = []
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, lambda number, _: self.signals.append(number))
        self.work, self.end_at = Path(tempfile.mkdtemp(prefix="evidence-")), time.monotonic() + arguments.minutes * 60
        self.building: subprocess.Popen | None = None
        self.mps_began, places = False, ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        self.mps_env = dict.fromkeys(places, str(self.work))
        mine = {"schema": 1, "what": "gpu_evidence", "commit": commit(arguments.folder), "dry_run": self.dry}
        self.document = json.loads(self.file.read_text()) if self.file.exists() else mine | {"parts": {}}
        if self.document | mine != self.document:
            sys.exit(f"gpu_evidence: {self.file} does not go on from {mine}: name another file with -J")
        when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        self.document |= {"machine": platform.platform(), "python": platform.python_version(), "when": when}
        self.env = os.environ | {"NVX_TEST_FIGURES": str(self.work / "figures"), "NVX_DEBUG": "info", "COLUMNS": "300"}
        if self.dry:
            self.env["LD_LIBRARY_PATH"] = str(self.folder / "simulated_driver")
            self.env["PATH"] = f"{SIMULATED_TOOLS}:{self.env['PATH']}"
            return
        site, given = self.work / "site", self.env.get("PYTHONPATH", "")
        tools = "/usr/local/nvidia/bin:/usr/bin:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
        self.env["PATH"] = f"{site}/bin:{self.env['PATH']}:{tools}"
        self.env["PYTHONPATH"] = f"{site}:{ROOT}/python:{given}".rstrip(":")

    def look(self) -> None:
        """Ends a wait once a signal has arrived. Every loop calls it, so no step is interrupted halfway."""
        if self.signals:
            raise NotRun("interrupted", signal.Signals(self.signals[0]).name)

    def begin_build(self, wanted: list[Part]) -> None:
        """Builds the torch module in the background once the carried packages are installed."""
        if self.dry or not any(part.kind in MODULE for part in wanted):
            return
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", f"{self.work}/site"]
        wheels = [*map(str, (self.folder / "wheels").glob("*.whl"))]
        options = [*KERNELS, *self.architectures(), "-DNVX_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"]
        steps = [
            [*pip, *wheels] if wheels else ["true"],
            ["cmake", "-S", str(ROOT), "-B", f"{self.work}/build", *options],
            ["cmake", "--build", f"{self.work}/build", "--parallel", JOBS, "--target", "_C", "nvx_staged"],
        ]
        script = " && ".join(map(shlex.join, steps))  # niced: the parts beside it time calls of the host
        self.building = start(["nice", "-n", "19", "sh", "-c", script], (self.work / "log").open("w"), self.env)

    def architectures(self) -> list[str]:
        """The options that build for the GPUs here, hidden ones included."""
        listed = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], 20, self.env).output
        found = sorted(set(re.findall(r"^\d+\.\d$", listed, re.MULTILINE)), key=float)
        return [f"-DTORCH_CUDA_ARCH_LIST={';'.join(found)}+PTX", "-DNVX_VISIBLE_GPUS=ON"] if found else []

    @functools.cached_property
    def gpus(self) -> int:
        """Those that CUDA shows: nvidia-smi lists all."""
        here = len(re.findall(r"^GPU \d+:", run(["nvidia-smi", "-L"], 20, self.env).output, re.MULTILINE))
        visible = self.env.get("CUDA_VISIBLE_DEVICES", "0," * here).split(",")
        return min(here, len(list(itertools.takewhile(lambda one: re.match(r"\s*[^\s-]", one), visible))))

    def command(self, part: Part, seconds: float) -> list[str]:
        words = shlex.split(part.words.replace("GPUS", str(self.gpus)) if part.gpus > 1 else part.words)
        words += shlex.split(part.dry) if self.dry and part.kind != "tests" else []
        if part.kind == "tool":
            return words
        if part.kind == "tests":
            file, chosen = ("test_gpu_cases.py", part.dry) if self.dry else ("test_gpu.py", part.words)
            staged = next((self.work / "build" / "staged").glob("_C*.so"), "") if part.name == "torch_staged" else ""
            pytest = ["env", f"NVX_TEST_MODULE={staged}", sys.executable, "-m", "pytest"]
            return [*pytest, "-v", "-p", "no:cacheprovider", f"tests/torch/{file}", "-k", chosen]
        if part.kind == "bench":
            if self.dry:  # CPU tensors, over gloo only
                words = [word for word in words if word not in ("symm_mem", "nccl", "--vs", "gloo", "-G")]
            place = ["--backend", "gloo"] if self.dry else ["--device", "cuda"]
            bench = [sys.executable, str(ROOT / "bench" / "run.py")]
            return [*bench, *words, *place, "-J", f"{self.work}/bench.json"]
        program = self.folder / ("nvx_gpu_simulated" if self.dry else PROGRAM)
        limit = [] if self.dry else ["--seconds", f"{max(1.0, seconds * 0.9 - 2):.0f}"]
        return [*shlex.split(part.under), str(program), *words, *limit]

    def written(self) -> Iterator[dict[str, Any]]:
        """The rows that a part wrote to files."""
        for file in filter(Path.exists, (self.work / "figures", self.work / "bench.json")):
            text = file.read_text()
            file.unlink()
            if file.suffix:
                document = json.loads(text)
                shared = {name: document[name] for name in ("gradient_bytes",) if name in document}
                yield from (shared | row for row in document["results"])
            else:
                yield from map(json.loads, text.splitlines())

    @functools.cached_property
    def mps(self) -> dict[str, str]:
        """The environment of MPS clients. The first use starts MPS; without it the GPU time-slices processes."""
        self.mps_began = True
        started = run([MPS, "-d"], 20, self.env | self.mps_env, self.look, leave=True)
        self.look()
        if started.state != "passed":
            raise NotRun("skipped", f"{MPS} -d: {started.why} {started.output[-300:]}")
        return self.mps_env

    def try_part(self, part: Part) -> Outcome:
        try:
            if part.gpus > 1 and self.gpus < part.gpus:
                raise NotRun("skipped", f"{self.gpus} GPU here: one process a GPU needs {part.gpus} or more")
            if part.kind in MODULE and self.building:
                if not ends(self.building, self.end_at - 10, self.look):
                    raise NotRun("skipped", "torch's module was not built in time")
                if self.building.returncode != 0:
                    log = (self.work / "log").read_text()
                    raise NotRun("failed", f"torch's module could not be built: {log[-600:]}")
            env = self.env | (self.mps if part.together else {"NVX_KERNELS": "1"})  # however slow in turns
            if (seconds := min(part.seconds, self.end_at - time.monotonic())) < 5:
                raise NotRun("skipped", "time ran out")
            outcome = run(self.command(part, seconds), seconds, env, self.look)
        except NotRun as reason:
            return Outcome(*reason.args)
        outcome.mps = part.together
        with contextlib.suppress(OSError, ValueError, KeyError):
            outcome.rows += self.written()
        with contextlib.suppress(OSError):
            if part.together and outcome.state != "passed":
                outcome.output += "\nMPS: " + (self.work / "server.log").read_text()[-1500:]
        return outcome

    def next_of(self, left: list[Part]) -> Part:
        """The first one, but while torch's module is being built the first that can run without it."""
        is_built = not self.building or self.building.poll() is not None
        return next((part for part in left if is_built or part.kind not in MODULE and not part.together), left[0])

    def go(self) -> int:
        found = self.document["parts"]
        wanted = [part for part in PARTS if {part.name, part.group} & self.given.parts]
        wanted = [part for part in wanted if self.given.again or found.get(part.name, {}).get("state") not in KEPT]
        try:
            self.begin_build(wanted)
            while wanted:
                wanted.remove(part := self.next_of(wanted))
                outcome = self.try_part(part)
                found[part.name] = dataclasses.asdict(outcome)
                draft = self.file.with_name(f".{self.file.name}.{os.getpid()}")
                draft.write_text(json.dumps(self.document, indent=1) + "\n")
                draft.replace(self.file)
                print(f"{part.name:16} {outcome.state:12} {outcome.seconds:6.1f} s  {outcome.why[:150]}", flush=True)
                if self.signals:
                    return 128 + self.signals[0]
        finally:
            if self.building:
                end(self.building)
            if self.mps_began:  # also after a failed start, which may come up late
                run(["sh", "-c", f"echo quit | {MPS}"], 10, self.env | self.mps_env)
            shutil.rmtree(self.work, ignore_errors=True)
        print(f"written: {self.file}")
        return int(any(part["state"] not in ("passed", "skipped") for part in found.values()))


def commit(folder: Path) -> str:
    if (noted := folder / "commit").exists():  # of the bundle
        return noted.read_text().strip()
    return subprocess.getoutput(f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD || echo unknown").splitlines()[-1]


def bundle(folder: Path) -> None:
    """Makes the bundle for a machine with a GPU and no network: the program for any GPUs, and packages."""
    build, chosen = folder / "build", [*KERNELS, "-DNVX_PYTHON=OFF", "-DTORCH_CUDA_ARCH_LIST="]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *chosen], check=True)
    subprocess.run(["cmake", "--build", str(build), "--parallel", JOBS, "--target", PROGRAM], check=True)
    shutil.copy2(build / PROGRAM, folder / PROGRAM)
    shutil.rmtree(build)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", f"{folder}/wheels"]
    subprocess.run([*pip, *WHEELS], check=True)
    (folder / "commit").write_text(made_of := commit(ROOT))
    print(f"{folder}: {sum(one.stat().st_size for one in folder.rglob('*')) / 2**20:.0f} MiB of {made_of}")


def read_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups, add = list(dict.fromkeys(part.group for part in PARTS)), parser.add_argument
    add("--bundle", metavar="DIR", type=Path, help="make the bundle, and run nothing")
    add("--from", dest="folder", metavar="DIR", type=Path, help="the bundle; in a dry run, where nvx_gpu_simulated is")
    add("-J", "--json", metavar="FILE", default="gpu_evidence.json", help="(default: gpu_evidence.json)")
    add("--minutes", type=float, default=9, help="for all of it (default 9)")
    add("--parts", default=",".join(groups), help=f"some of {','.join(groups)}, or {','.join(NAMES)}")
    add("--again", action="store_true", help="run also the parts that the file has already")
    add("--dry-run", action="store_true", help="on simulated devices, without a GPU")
    arguments = parser.parse_args(given)
    arguments.parts = set(arguments.parts.split(","))
    if unknown := arguments.parts - {*groups, *NAMES}:
        parser.error(f"--parts: no part or group {', '.join(unknown)}")
    arguments.folder = arguments.folder or ROOT / "build" / ("make/cpp" if arguments.dry_run else "gpu_bundle")
    return arguments


if __name__ == "__main__":
    options = read_arguments(sys.argv[1:])
    sys.exit(bundle(options.bundle.absolute()) if options.bundle else Run(options).go())
