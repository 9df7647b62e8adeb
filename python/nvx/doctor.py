"""`nvx doctor`: checks that this build fits this torch, that the machine has what nvx needs, and every collective.

Each line is [OKAY], [WARN] or [FAIL]; a line that is not OKAY names the cause and one remedy. The exit status is 0 for
success, 1 for warnings under --strict, 2 for a failure.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import nvx

from . import gpudirect, interrupts
from .bench.collectives import COLLECTIVES
from .bench.peers import Case, torch_call
from .bench.world import World

SCHEMA = 1
RANKS = 2
RANK_FAILED = (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException)


@dataclasses.dataclass
class Finding:
    name: str
    state: str  # OKAY, WARN or FAIL
    text: str
    hint: str = ""

    def line(self):
        return f"[{self.state}] {self.name}: {self.text}" + (f" -> {self.hint}" if self.hint else "")


def okay(name, text):
    return Finding(name, "OKAY", text)


def check_versions():
    text = f"nvx {nvx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return okay("versions", text)


def check_distribution():
    """Another distribution that is named nvx owns the same files and the same command."""
    try:
        other = metadata.distribution("nvx")
    except metadata.PackageNotFoundError:
        return None
    ours = any(entry.value == "nvx:_autoload" for entry in other.entry_points)
    cause = "an older build of nvx" if ours else "another project's"
    text = f"the distribution nvx {other.version} is {cause}, and both own the package and the command nvx"
    advice = "pip uninstall nvx torch-nvx, then `pip install --no-build-isolation .` in nvx's source directory"
    return Finding("distribution", "WARN", text, advice)


def check_build():
    try:
        module = nvx._load()
    except nvx.Unusable as error:
        cause, _, advice = str(error).rstrip(".").rpartition(": ")
        return Finding("build", "FAIL", cause, advice)
    facts = module.build_info()
    if why := getattr(nvx._build_facts(), "NO_KERNELS", ""):
        facts["cuda"] = f"{facts['cuda']} ({why})"
    return okay("build", ", ".join(f"{key} {value}" for key, value in sorted(facts.items())))


def check_variables():
    """NVX_* variables that are unknown or have invalid values; None if the C++ module cannot be loaded."""
    try:
        module = nvx._load()
    except nvx.Unusable:
        return None  # check_build reports it
    try:
        module.tuning()
    except ValueError as error:
        why = str(error).removeprefix("nvx: ").partition(" Next: ")[0]
        return Finding("variables", "FAIL", why, "correct NVX_TUNE, or unset it; `nvx explain` lists its keys")
    rows = module.config_table()
    wrong = [
        f"{name}={os.environ.get(name)} is {fault}: "
        + ("groups over several hosts fail" if name == "NVX_ALLOW_FROM" else f"the default ({default}) is used")
        for name, default, _, _, fault in rows
        if fault
    ]
    wrong += [f"{name} is not a variable of nvx ({hint})" for name, hint in module.config_unknown()]
    level, best = os.environ.get("NVX_CPU_LEVEL", "").lower(), module.build_info()["cpu_level"]
    if level in ("base", "v3", "v4") and level != best:
        wrong.append(f"NVX_CPU_LEVEL={level} is not supported by this machine: {best} is used")
    if wrong:
        return Finding("variables", "WARN", "; ".join(wrong), "`nvx env` lists the variables and their valid values")
    known = sum(name in os.environ for name, *_ in rows)
    return okay("variables", f"no fault found in {known} NVX_* variables" if known else "no NVX_* variable is set")


def check_served_names():
    """The backend of a program that requests a name in NVX_AS; None if that is not set."""
    names, strange = nvx.stand_in.parse(os.environ.get("NVX_AS", ""))
    if strange:
        text = f"NVX_AS={os.environ['NVX_AS']}: nvx cannot replace {', '.join(strange)}, and leaves those groups alone"
        return Finding("NVX_AS", "WARN", text, f"name {' or '.join(nvx.stand_in.names())}")
    if not names:
        return None
    script = (
        "import sys, torch.distributed as dist;"
        "dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1);"
        "import nvx; print(dist.get_backend(), nvx._backend(dist.group.WORLD).name())"
    )
    lines = []
    for name in names:
        ended = in_fresh_python(script, name)
        if ended.stdout.split() != [name, "nvx"]:
            advice = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or call nvx.serve_as in the program"
            runs = how_it_ended(ended) if ended.returncode else f"runs over {(ended.stdout.split() or ['nothing'])[-1]}"
            return Finding("NVX_AS", "FAIL", f"a group requested as {name} {runs}", advice)
        lines.append(f"a group requested as {name} runs over nvx, and get_backend() answers {name}")
    return okay("NVX_AS", "; ".join(lines))


def in_fresh_python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def how_it_ended(process):
    last = last_line(process.stderr)
    return f"ended with {process.returncode}" + (f": {last}" if last else "")


def check_registration():
    """Runs in a fresh process, as a user's script would."""
    script = (
        "import torch, time; t = time.perf_counter(); import nvx; nvx._autoload(); t = time.perf_counter() - t;"
        "import sys; print('NVX' in torch.distributed.Backend._plugins, 'nvx._C' in sys.modules, 1e3 * t)"
    )
    alone = "import torch; print('NVX' in torch.distributed.Backend._plugins)"
    with_hook, timed = in_fresh_python(alone), in_fresh_python(script)
    if with_hook.returncode != 0:
        advice = "repair the installation of torch, or find the file that shadows one of its modules"
        return Finding("registration", "FAIL", f"`import torch` in a fresh Python {how_it_ended(with_hook)}", advice)
    if timed.returncode != 0:
        text = f"`import torch, nvx` in a fresh Python {how_it_ended(timed)}"
        return Finding("registration", "FAIL", text, "install nvx again; if that does not help, please report this")
    fix = "install nvx with pip, and leave TORCH_DEVICE_BACKEND_AUTOLOAD unset; or import nvx in the script"
    if with_hook.stdout.split() != ["True"]:
        return Finding("registration", "WARN", "`import torch` alone does not register nvx", fix)
    if timed.stdout.split()[:2] != ["True", "False"]:
        return Finding("registration", "WARN", "the hook loads C++ before a group is made", "please report this")
    millis = float(timed.stdout.split()[2])
    return okay("registration", f"`import torch` is enough (a second call of the hook takes {millis:.2f} ms)")


def check_cores():
    try:
        cores = nvx._load().processor()["cores"]  # within the cgroup's quota, too
    except nvx.Unusable:
        return None  # check_build reports it
    text = f"{cores} of {os.cpu_count()} cores are available to this process"
    advice = "ranks share one core: allow more (taskset, docker --cpuset-cpus and --cpus)"
    return Finding("cores", "WARN", text, advice) if cores < 2 else okay("cores", text)


def check_memfd():
    try:
        os.close(os.memfd_create("nvx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        advice = "memfd_create needs Linux 3.17 or newer and no seccomp filter against it"
        return Finding("shared memory", "FAIL", f"memfd_create: {error}", advice)
    return okay("shared memory", "memfd works; nvx does not use /dev/shm")


def check_pidfd():
    if not hasattr(os, "pidfd_open"):
        return Finding("peer death", "WARN", "this Python has no os.pidfd_open, so the check was skipped")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("peer death", "WARN", f"pidfd_open: {error}", "Linux 5.3 or newer: errors may lack exit codes")
    return okay("peer death", "pidfd works: errors name the signal or exit code of a dead rank")


def memory_limit(own="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """The least memory limit of this cgroup, v2 or v1, and of those above it in bytes; None if there is none."""
    limits = []
    for line in Path(own).read_text().splitlines() if os.path.exists(own) else ():  # 0::/a/b, of v1 4:memory:/a/b
        _, controllers, path = line.split(":", 2)
        names = ("memory", "memory.limit_in_bytes") if "memory" in controllers.split(",") else ("", "memory.max")
        for folder in (Path(path), *Path(path).parents):  # a container may have no folder but the last
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(Path(root, names[0], folder.relative_to("/"), names[1]).read_text()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def check_memory():
    limit = memory_limit()
    if limit is None:
        return okay("memory", "no cgroup limit")
    text = f"the cgroup allows {limit >> 20} MiB, shared staging included"
    advice = "raise it, or lower NVX_STAGING_MB"
    return Finding("memory", "WARN", text, advice) if limit < 1 << 30 else okay("memory", text)


def check_files():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, advice = f"limit {soft}", "ulimit -n 1024 or more: every peer on a host takes a few"
    return Finding("open files", "WARN", text, advice) if soft < 1024 else okay("open files", text)


def check_temporary():
    try:
        return okay("temporary files", f"in {tempfile.gettempdir()}")
    except FileNotFoundError as error:
        advice = "set TMPDIR to a folder that can be written (docker run --tmpfs /tmp)"
        return Finding("temporary files", "FAIL", error.strerror, advice)


def check_loopback():
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding("loopback", "FAIL", f"TCP to 127.0.0.1: {error}", "torchrun's store needs it: bring up `lo`")
    return okay("loopback", "TCP to 127.0.0.1 works, as torchrun's store needs it")


CHECKS = (
    check_versions, check_distribution, check_build, check_registration, check_variables, check_served_names,
    check_cores, check_memfd, check_pidfd, check_memory, check_files, check_temporary, check_loopback,
)  # fmt: skip


@contextlib.contextmanager
def group_of(rank, ranks, folder, logged):
    """This rank's group, and its verdict, which goes to a file in the end; its log goes to another file if `logged`."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames the _tensor calls; both names stay
    if logged:
        os.dup2(os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    began, verdict = time.perf_counter(), {}
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nvx", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    yield verdict
    dist.destroy_process_group()
    verdict["seconds"] = time.perf_counter() - began
    Path(folder, f"{rank}.json").write_text(json.dumps(verdict))


def wrong_results(device, counts, group=None):
    """The collectives of which an element is wrong, by the checks of `nvx bench`; calls each with so many floats."""
    world = World(dist.get_rank(group), dist.get_world_size(group), device)
    wrong = []
    for row in COLLECTIVES.values():
        for count in counts:
            case = Case(row, 4 * count, "float", "sum", 0, row.variants[0], world)
            call = torch_call(case, group)
            case.prepare(salt=1)
            call()
            wrong += [row.name] if case.count_wrong(salt=1) else []
    return sorted(set(wrong))


def run_smoke(rank, ranks, folder, apart):
    """One rank of the CPU. With `apart` it is a host of its own."""
    if apart:
        os.environ.update(NVX_HOST_ID=f"doctor-{rank}", NVX_DEBUG="info")
    with group_of(rank, ranks, folder, logged=apart) as verdict:
        verdict["wrong"] = wrong_results(torch.device("cpu"), [1_000])


def exact_on_device(device, group=None):
    """Calls collectives of the device's tensors, of sizes for packets in one trip and in two, and for chunks. Returns
    whether kernels serve the group, and the names of calls with wrong results."""
    wrong = wrong_results(device, [1_000, 50_000, 500_000], group)
    return {"kernels": nvx.pool_stats(group) is not None, "wrong": wrong}


def run_on_gpu(rank, ranks, folder, gpus):
    """One rank, on one of these GPUs."""
    if ranks > len(gpus):  # they take turns on it, which kernels are otherwise too slow for
        os.environ.setdefault("NVX_KERNELS", "1")
    device = torch.device("cuda", gpus[rank % len(gpus)])
    torch.cuda.set_device(device)
    with group_of(rank, ranks, folder, logged=True) as verdict:
        verdict.update(exact_on_device(device))


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def verdicts_of(run_rank, ranks, given):
    """The verdict of each rank, and the log of all; or why a rank failed, in one line."""
    with interrupts.interruptible(), tempfile.TemporaryDirectory(prefix="nvx-doctor-") as folder:
        try:
            torch.multiprocessing.spawn(run_rank, args=(ranks, folder, given), nprocs=ranks, daemon=True)
        except RANK_FAILED as error:
            return [], f"a rank failed: {last_line(str(error))}"
        verdicts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        return verdicts, "".join(log.read_text() for log in sorted(Path(folder).glob("*.log")))


def judge_results(name, verdicts, advice="please report this"):
    """The finding that some results are wrong; None if none is."""
    wrong = sorted({collective for verdict in verdicts for collective in verdict["wrong"]})
    return Finding(name, "FAIL", f"wrong results from {', '.join(wrong)}", advice) if wrong else None


def check_smoke():
    verdicts, log = verdicts_of(run_smoke, RANKS, False)
    if not verdicts:
        return Finding("collectives", "FAIL", log, "run `NVX_DEBUG=info nvx doctor` for details")
    seconds = max(verdict["seconds"] for verdict in verdicts)
    text = f"{', '.join(COLLECTIVES)} exact on {RANKS} ranks, with set-up {seconds:.2f} s"
    return judge_results("collectives", verdicts) or okay("collectives", text)


def check_between_hosts():
    """Runs the collectives with each rank as a host of its own, so that data goes over UCX, or over TCP with a job key.
    A single host needs neither, so only wrong results and wrong settings are failures."""
    name = "between hosts"
    way = "a job key" if "NVX_JOB_KEY" in os.environ else "UCX"
    if way == "UCX" and not nvx._load().build_info()["ucx"]:
        text = "built without UCX: a group that spans hosts is refused"
        return Finding(name, "WARN", text, "for several hosts: pip install libucx-cu13, and build nvx again")
    verdicts, log = verdicts_of(run_smoke, RANKS, True)
    if not verdicts:
        blamed = [v for v in ("NVX_SOCKET_IFNAME", "NVX_LIBUCP", "NVX_JOB_KEY") if v in os.environ and v in log]
        if blamed:
            return Finding(name, "FAIL", log, f"change {blamed[0]}, or unset it")
        return Finding(name, "WARN", log, f"see docs/hosts.md for the requirements of {way}")
    found = re.search(r"between hosts: (.*)", log)
    used, ports = found.group(1) if found else way, ", ".join(nvx._load().network()["rdma_ports"])
    text = f"{used}; {judge_rdma(used, ports)}; the same collectives exact between two hosts, made by NVX_HOST_ID"
    advice = "install a UCX with RDMA, or name one in NVX_LIBUCP (docs/install.md, UCX)"
    unused = way == "UCX" and "although this host has RDMA" in text
    return judge_results(name, verdicts) or (Finding(name, "WARN", text, advice) if unused else okay(name, text))


def judge_rdma(used, ports):
    """Whether the transports that a link names, as in "rc_verbs on rxe0:1", are RDMA's. ports: the active ones."""
    if re.search(r", (rc|dc|ud|gga)_\w+ on |, srd\w* on ", used):
        return "over RDMA"
    return f"over TCP, although this host has RDMA ({ports})" if ports else "over TCP: no active RDMA port here"


def try_gpus(gpus):
    """A finding about these GPUs: one rank on each, or two on a single one."""
    verdicts, log = verdicts_of(run_on_gpu, max(len(gpus), 2), gpus)
    return judge_gpus(verdicts, log) if verdicts else Finding("GPUs", "FAIL", log, "look at `nvidia-smi -q`")


def judge_gpus(verdicts, log):
    """The finding that the ranks' verdicts and their log make."""
    if wrong := judge_results("GPUs", verdicts, "set NVX_KERNELS=0, and report this"):
        return wrong
    exact = f"exact on {len(verdicts)} ranks"
    if not all(v["kernels"] for v in verdicts):
        found = re.search(r"go through host memory: (.*)", log)
        cause, _, advice = (found.group(1) if found else "NVX_KERNELS=0").partition(". Next: ")
        text = f"collectives go through host memory, {exact}: {cause}"
        return Finding("GPUs", "WARN", text, advice or "NVX_KERNELS=1 insists on kernels")
    if slow := sorted(set(re.findall(r"rank \d+ is reached through pinned host memory.*", log))):
        text = f"kernels, {exact}; {'; '.join(slow)}"
        return Finding("GPUs", "WARN", text, "`nvidia-smi topo -p2p r` shows which GPUs reach each other")
    return okay("GPUs", f"kernels, {exact}")


def gpu_count():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpus():
    """Runs the kernels on every GPU that this process sees. If not all work together, tries each alone."""
    if (count := gpu_count()) == 0:
        return okay("GPUs", "none here" if torch.version.cuda else "none here that this torch, without CUDA, could use")
    names = collections.Counter(torch.cuda.get_device_name(gpu) for gpu in range(count))
    these = ", ".join(f"{n} x {name}" for name, n in names.items())
    if not nvx._load().build_info()["cuda"]:
        why = getattr(nvx._build_facts(), "NO_KERNELS", "") or "without CUDA"
        text = f"{these}: collectives go through host memory, because this build has no kernels ({why})"
        return Finding("GPUs", "WARN", text, "build where nvcc is: docs/install.md; AMD: docs/other-accelerators.md")
    found = try_gpus(list(range(count)))
    if found.state != "OKAY" and count > 1:
        for gpu in range(count):
            if (alone := try_gpus([gpu])).state != "OKAY":
                found.text += f"; GPU {gpu} alone: {alone.text}"
    return dataclasses.replace(found, text=f"{these}: {found.text}")


def run_apart_on_gpu(rank, ranks, folder, gpus):
    os.environ.update(NVX_HOST_ID=f"doctor-{rank}", NVX_DEBUG="info")
    run_on_gpu(rank, ranks, folder, gpus)


def try_gpudirect():
    """The line about GPUDirect that a group of two hosts by name logs."""
    log = verdicts_of(run_apart_on_gpu, 2, list(range(gpu_count())))[1]
    found = re.search(r"between hosts, (?:all_gather|device tensors) .*", log)
    return found.group() if found else last_line(log)


def examine():
    """Yields every finding in order. Collectives run only if no check has failed."""
    findings = []
    for check in CHECKS:
        if finding := check():
            findings.append(finding)
            yield finding
    if all(finding.state != "FAIL" for finding in findings):
        yield check_smoke()
        yield check_between_hosts()
        yield check_gpus()
        for fact in gpudirect.facts(nvx._load(), tried=try_gpudirect) if gpu_count() else ():
            yield okay(fact["name"], fact["text"])  # none is a fault: without GPUDirect, data goes through host memory


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="nvx doctor", description="Checks this machine and this build of nvx.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings")
    options = parser.parse_args(arguments)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    states = {finding.state for finding in findings}
    status = 2 if "FAIL" in states else 1 if "WARN" in states and options.strict else 0
    if options.json:
        report = {"schema": SCHEMA, "status": status, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(report, indent=2))
    return status
