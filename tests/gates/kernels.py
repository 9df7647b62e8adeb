"""The CUDA kernels, as far as a machine without a device can judge them: they compile for every architecture, and
their code has the accesses that the protocol stands on."""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import shutil
import sys
import time
import warnings

from builds import GCC, compile_all, configure
from common import Failed, Skipped, shut_if

# What PTX must have, and why.
WANTED = (
    (r"\bld\.relaxed\.sys\.v2\.u64\b", "packets are read in one access of 16 bytes"),
    (r"\bst\.relaxed\.sys\.v2\.u64\b", "packets are written in one access of 16 bytes"),
    (r"\bld\.acquire\.sys\.b64\b", "counters of peers are acquired at system scope"),
    (r"\bst\.release\.sys\.b64\b", "counters for peers are released at system scope"),
    (r"\bld(\.global)?\.(v2\.[ubs]64|v4\.[ubs]32)\b", "chunks are read 16 bytes at a time"),
    (r"\bst(\.global)?\.(v2\.[ubs]64|v4\.[ubs]32)\b", "chunks are written 16 bytes at a time"),
)
UNWANTED = (
    (r"\bfma\.\w+", "contracted arithmetic: the bits would not be the host's"),
    (r"\b\w+(\.\w+)*\.ftz\b", "subnormal numbers are flushed: the bits would not be the host's"),
    (r"\b(div|rcp|sqrt)\.(approx|full)\.f32\b", "approximate arithmetic: the bits would not be the host's"),
    (r"^\s*(@\S+\s+)?trap\s*;", "a kernel never traps"),
    (r"\b(ld|st)\.volatile\b", "order travels on the flag, not on volatile"),
    (r"\bld\.global\.nc\b", "what peers write is not constant while a kernel runs"),
)
# What the machine code must have of it, after all optimisation.
WANTED_CODE = (
    (r"\bLDG?\.E\.128\.STRONG\.SYS\b", "reads of packets"),
    (r"\bSTG?\.E\.128\.STRONG\.SYS\b", "writes of packets"),
    (r"\bLDG?\.E\.64\.STRONG\.SYS\b", "reads of counters"),
    (r"\bSTG?\.E\.64\.STRONG\.SYS\b", "writes of counters"),
    (r"\bLDG?\.E\.128(?!\.STRONG)", "reads of chunks"),
    (r"\bSTG?\.E\.128(?!\.STRONG)", "writes of chunks"),
    (r"\bMEMBAR\.\S*\.SYS\b", "fences"),
)
# All that a wheel has machine code for. Whatever else there is gets what the driver makes of the PTX of the oldest.
ARCHITECTURES = ("80", "90", "100", "120")
PTX = "80"
OLDEST = "75"  # that TORCH_CUDA_ARCH_LIST may name, and CUDA 13 compiles for; what it uses is not looked into
MOST_REGISTERS = 128  # 512 lanes a block
BUILT_FOR = "9.0"  # by CMake and without it: each other one would take as long again, and is looked into below
MOST_CORE_SECONDS = 8 * 240  # of all that `nvx gpucheck` builds, without CMake and for one architecture

FIGURES = "bench/results/kernels.json"
BEGIN, END = "<!-- made by tests/gates/run cuda --fix -->\n", "<!-- end of the table -->\n"


def text_breaches(ptx):
    """What is wrong with PTX, a sentence each."""
    found = [f"nowhere {pattern}: {why}" for pattern, why in WANTED if not re.search(pattern, ptx)]
    for pattern, why in UNWANTED:
        hit = re.search(pattern, ptx, re.MULTILINE)
        if hit:
            found.append(f"{hit.group(0).strip()}: {why}")
    return found


def code_breaches(code):
    """What is wrong with machine code, a sentence each."""
    return [f"nowhere {pattern}: {what}" for pattern, what in WANTED_CODE if not re.search(pattern, code)]


def resources(log):
    """What ptxas -v tells of each kernel: a dictionary with its name, architecture, registers and stack, and the bytes
    that it spills, together with the functions that it calls."""
    entries = []
    for line in log.splitlines():
        if begin := re.search(r"Compiling entry function '\w*?\d(run_[a-z]+)\w*' for 'sm_(\w+)'", line):
            entries.append({"kernel": begin[1], "architecture": begin[2], "spilled": 0})
        elif entries and (spills := re.search(r"(\d+) bytes spill stores", line)):
            entries[-1]["spilled"] += int(spills[1])
        elif entries and (used := re.search(r"Used (\d+) registers.*?(?:(\d+) bytes cumulative stack size|$)", line)):
            entries[-1] |= {"registers": int(used[1]), "stack": int(used[2] or 0)}
    return entries


def resource_breaches(entries):
    """What is wrong with what the kernels use, a sentence each."""
    found = []
    for one in entries:
        name = f"{one['kernel']} for sm_{one['architecture']}"
        found += [f"{name}: {one['registers']} registers"] if one["registers"] > MOST_REGISTERS else []
        found += [f"{name}: {one['spilled']} bytes spilled"] if one["spilled"] else []
    return found


def find_nvcc():
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        raise Skipped("there is no nvcc here")
    return nvcc


def by_hand(context):
    """All that `nvx gpucheck` builds where there is no CMake."""
    if not importlib.util.find_spec("torch"):
        raise Skipped("this python has no torch")
    return without_cmake(context, pathlib.Path(find_nvcc()), ("program", "kernels", "staged"))


def cuda(context):
    """Built by CMake and without it, for one architecture; compiled for every one, to look into."""
    nvcc = find_nvcc()
    folder = context.build_dir / "cuda"
    told = [by_cmake(context, folder)]
    folder.mkdir(parents=True, exist_ok=True)
    told.append(without_cmake(context, pathlib.Path(nvcc), ("program",)))
    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        *found, _ = pool.map(lambda arch: assemble(context, folder, nvcc, arch), (*ARCHITECTURES, OLDEST))
    entries = [entry for _, some in found for entry in some]
    shut_if(resource_breaches(entries), "kernels that use too much")
    told.append(keep_figures(context, nvcc, entries))
    told.append(sass(context, [cubin for cubin, _ in found]))
    return "; ".join(filter(None, told))


def by_cmake(context, folder):
    listed = re.search(r"set\(architectures ([\w -]+)\)", context.read("cmake/cuda.cmake"))
    wanted = [*(f"{one}-real" for one in ARCHITECTURES), f"{PTX}-virtual"]
    if not listed or listed[1].split() != wanted:
        raise Failed(f"cmake/cuda.cmake builds for other architectures than {' '.join(wanted)}")
    version = re.search(r"version (\d+)\.(\d+)", context.run(["cmake", "--version"], "cmake"))
    if version and (int(version[1]), int(version[2])) < (3, 26):
        return "by CMake not built, which is older than 3.26 (pip install cmake)"
    configure(context, "cuda", *GCC, "-DNVX_CUDA=ON", "-DNVX_GPU_TESTS=ON", f"-DTORCH_CUDA_ARCH_LIST={BUILT_FOR}")
    compile_all(context, folder, "nvx_cuda", "nvx_gpu", "nvx_gpu_bare")
    start_gpucheck(context, folder / "nvx_gpu", "facts", "correct", "processes")
    return ""


LOADS = """
import sys, torch
from nvx.gpucheck.uses.module import load_module
load_module(sys.argv[1])
print(sys.modules["nvx._C"].build_info()["cuda"])
"""


def without_cmake(context, nvcc, names):
    """What `nvx gpucheck` does where there is no CMake, and how long it takes: what it builds can be started."""
    package = context.root / "python"
    if str(package) not in sys.path:
        sys.path.insert(0, str(package))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where there is no torch, nvx says that it cannot serve it
        from nvx.gpucheck import build, by_hand
        from nvx.gpucheck.steps import Steps
    folder = context.build_dir / "without_cmake"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {what: build.place_of(what, folder) for what in names}
    toolkit = build.toolkit_of(nvcc)
    job = by_hand.Job(context.root, folder, nvcc, toolkit, [BUILT_FOR], wanted, by_hand.find_ucx())
    began = time.monotonic()
    missing = by_hand.compile_all(job, Steps(folder / "build.log", 3600), context.jobs)
    seconds = time.monotonic() - began
    shut_if([f"{what}: {why}" for what, why in missing.items()], "things that cannot be built without CMake")
    start_gpucheck(context, wanted["program"], "facts")
    surroundings = {**os.environ, "PYTHONPATH": str(package)}
    for what, has_kernels in (("kernels", "True"), ("staged", "False")):
        if what in wanted:
            said = context.run([sys.executable, "-c", LOADS, wanted[what]], f"loading {what}", env=surroundings)
            if said.split()[-1] != has_kernels:
                raise Failed(f"the module {what} is not what it is called", said)
    told = f"without CMake {seconds:.0f} s on {context.jobs} cores"
    if seconds * context.jobs > MOST_CORE_SECONDS:
        raise Failed(f"{told}: even eight would take more than the 4 minutes that `nvx gpucheck` has for it")
    return told


def assemble(context, folder, nvcc, arch):
    """The kernels' PTX for an architecture, judged; and what ptxas makes of it: the file, and what its kernels use."""
    source = context.root / "csrc" / "kernel" / "launch_cuda.cu"
    ptx, cubin = folder / f"launch_cuda_{arch}.ptx", folder / f"launch_cuda_{arch}.cubin"
    flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", f"-I{context.root / 'csrc'}"]
    context.run([nvcc, *flags, f"-arch=compute_{arch}", "-ptx", source, "-o", ptx], "nvcc -ptx")
    shut_if(text_breaches(ptx.read_text()), f"things wrong with the kernels' PTX for {arch}")
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    log = context.run([ptxas, "-v", "--fmad=false", f"-arch=sm_{arch}", ptx, "-o", cubin], "ptxas")
    entries = resources(log)
    if not entries:
        raise Failed("ptxas names no kernel", log[-2000:])
    return cubin, entries


def figures_table(figures):
    """What the kernels use, as docs/gpucheck.md has it."""
    rows = [
        f"| `{one['kernel']}` | sm_{one['architecture']} | {one['registers']} | {one['stack']} | {one['spilled']} |\n"
        for one in sorted(figures["kernels"], key=lambda one: (one["kernel"], int(one["architecture"])))
    ]
    head = "| kernel | for | registers | stack | spilled |\n|---|---|---|---|---|\n"
    return f"{BEGIN}With nvcc {figures['nvcc']}; stack and spills in bytes:\n\n{head}{''.join(rows)}{END}"


def keep_figures(context, nvcc, entries):
    """The file and the table that is made from it say what this compiler makes of the kernels; what another one makes
    of them is not held against them."""
    version = re.search(r"\bV([\d.]+)", context.run([nvcc, "--version"], "nvcc"))
    figures = {"schema": 1, "what": "kernels", "command": "tests/gates/run cuda --fix", "nvcc": version[1]}
    figures |= {"kernels": entries}
    file, page = context.root / FIGURES, context.root / "docs" / "gpucheck.md"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    if context.fix and kept != figures:
        file.write_text(json.dumps(figures, indent=1) + "\n")
        kept = figures
    text = page.read_text()
    if kept and figures_table(kept) not in text:
        if not context.fix:
            raise Failed(f"docs/gpucheck.md is not what {FIGURES} says; run: tests/gates/run cuda --fix")
        page.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", figures_table(kept), text, flags=re.DOTALL))
    if kept.get("nvcc") == figures["nvcc"] and kept != figures:
        raise Failed(f"{FIGURES} is not what the kernels use by now; run: tests/gates/run cuda --fix")
    return f"at most {max(one['registers'] for one in entries)} registers, none spilled"


def start_gpucheck(context, program, *parts):
    """What `nvx gpucheck` runs on a machine with GPUs: it links, starts, and without one says so, as processes too."""
    for part in parts:
        said = context.run([program, part, "--seconds", "20"], f"nvx_gpu {part}")
        if not re.search(r'"end": "(skipped|passed)"', said):
            raise Failed(f"nvx_gpu {part} says neither that it passed nor that it was skipped", said[-2000:])


def sass(context, cubins):
    """What the machine code itself says, where cuobjdump can show it."""
    tool = context.tool("cuobjdump")
    if not tool:
        return "machine code not looked into: no cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)"
    helped = dict(os.environ, PATH=f"{pathlib.Path(tool).parent}:{os.environ['PATH']}")  # by nvdisasm beside it
    told = []
    for cubin, arch in zip(cubins, ARCHITECTURES, strict=True):
        code = context.run([tool, "-sass", cubin], "cuobjdump", env=helped)
        shut_if(code_breaches(code), f"things missing in the machine code for {arch}")
        told.append(f"sm_{arch} " + "/".join(str(len(re.findall(pattern, code))) for pattern, _ in WANTED_CODE))
    return f"machine code ({', '.join(what for _, what in WANTED_CODE)}): " + ", ".join(told)


# (PTX, whether it is a breach)
GOOD = """ld.relaxed.sys.v2.u64 st.relaxed.sys.v2.u64 ld.acquire.sys.b64 st.release.sys.b64
ld.v2.u64 st.v2.u64 mul.rn.f32"""
EXAMPLES = (
    (GOOD, False),
    (GOOD.replace("acquire.sys", "acquire.gpu"), True),
    (GOOD.replace("ld.relaxed.sys.v2.u64", "ld.relaxed.sys.u64"), True),
    (GOOD + " fma.rn.f32", True),
    (GOOD + " add.ftz.f32", True),
    (GOOD + " div.approx.f32", True),
    (GOOD + "\n    @%p1 trap;", True),
    (GOOD + " ld.volatile.u64", True),
    (GOOD + " ld.global.nc.v4.u32", True),
)

CODE = """LD.E.128.STRONG.SYS R4 ST.E.128.STRONG.SYS [R2] LD.E.64.STRONG.SYS R4 ST.E.64.STRONG.SYS [R2]
LD.E.128 R4 ST.E.128 [R2] MEMBAR.ALL.SYS"""
# (SASS, whether it is a breach)
CODE_EXAMPLES = (
    (CODE, False),
    (CODE.replace("LD.E.128 ", "LD.E.64 "), True),
    (CODE.replace("ST.E.128.STRONG.SYS", "ST.E.64.STRONG.SYS"), True),
    (CODE.replace("LD.E.64.STRONG.SYS", "LD.E.64.STRONG.GPU"), True),
    (CODE.replace("ALL.SYS", "ALL.GPU"), True),
)

ENTRY = """ptxas info    : Compiling entry function '_ZN3nvx6kernel13run_reductionE' for 'sm_90'
    1472 bytes stack frame, {own} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 1472 bytes cumulative stack size, 808 bytes cmem[0]
ptxas info    : Function properties for _ZN3nvx6kernel4foldE
    0 bytes stack frame, {called} bytes spill stores, 0 bytes spill loads
"""
# (ptxas -v, whether it is a breach)
RESOURCE_EXAMPLES = (
    (ENTRY.format(own=0, registers=128, called=0), False),
    (ENTRY.format(own=0, registers=129, called=0), True),
    (ENTRY.format(own=0, registers=128, called=4), True),
    (ENTRY.format(own=4, registers=128, called=0), True),
)
