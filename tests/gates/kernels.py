"""The CUDA kernels, as far as a machine without a device can judge them: they compile for every architecture, and
their code has the accesses that the protocol stands on."""

import concurrent.futures
import os
import pathlib
import re
import shutil

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
# Most of it is what a function saves of its caller's registers, once a call. Some is in loops: the folds share their
# registers with who calls them, and keep packs that are loaded ahead on the stack.
MOST_SPILLED = 256
LOOKED_INTO = ("80", "90")  # the oldest, and what most machines have
MOST_REGISTERS = 128  # 512 lanes a block


def text_breaches(ptx):
    """What is wrong with PTX, a sentence each."""
    found = [f"nowhere {pattern}: {why}" for pattern, why in WANTED if not re.search(pattern, ptx)]
    for pattern, why in UNWANTED:
        hit = re.search(pattern, ptx, re.MULTILINE)
        if hit:
            found.append(f"{hit.group(0).strip()}: {why}")
    return found


def resources(log):
    """Entry functions in ptxas -v's words: (name, registers, stack), and the most that any function spills."""
    entries, entry = [], None
    for line in log.splitlines():
        if begin := re.search(r"Compiling entry function '\w*?\d(run_[a-z]+)\w*' for '(\w+)'", line):
            entry = begin.groups()
        if used := re.search(r"Used (\d+) registers.*?(?:(\d+) bytes cumulative stack size|$)", line):
            if entry:
                entries.append((*entry, int(used.group(1)), int(used.group(2) or 0)))
            entry = None
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    return entries, max(spills, default=0)


def cuda(context):
    """Every architecture through CMake, as a wheel has it, where CMake can; then two again by hand, to look into."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        raise Skipped("there is no nvcc here")
    version = re.search(r"version (\d+)\.(\d+)", context.run(["cmake", "--version"], "cmake"))
    too_old = version and (int(version[1]), int(version[2])) < (3, 26)
    folder = context.build_dir / "cuda"
    if not too_old:
        configure(context, "cuda", *GCC, "-DNVX_CUDA=ON", "-DNVX_GPUCHECK=ON")
        compile_all(context, folder, "nvx_cuda", "nvx_gpucheck")
        start_gpucheck(context, folder / "nvx_gpucheck")
    folder.mkdir(parents=True, exist_ok=True)
    built = "by CMake not built, which is older than 3.26 (pip install cmake); " if too_old else ""
    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        found = list(pool.map(lambda arch: assemble(context, folder, nvcc, arch), LOOKED_INTO))
    rows = [entry for _, entries, _ in found for entry in entries]
    (folder / "registers.txt").write_text("".join(f"{n} {a}: {r} registers, {s} stack\n" for n, a, r, s in rows))
    shut_if([f"{n} {a}: {r} registers" for n, a, r, _ in rows if r > MOST_REGISTERS], "kernels with too many registers")
    spilled = {arch: spills for arch, (_, _, spills) in zip(LOOKED_INTO, found, strict=True)}
    shut_if([f"sm_{a}: {n} bytes" for a, n in spilled.items() if n > MOST_SPILLED], "functions that spill too much")
    table, most = ", ".join(f"{n} {a} {r}" for n, a, r, _ in rows), max(spilled.values())
    code = sass(context, [cubin for cubin, _, _ in found])
    return f"{built}registers: {table}; at most {most} bytes spilled a function; {code}"


def assemble(context, folder, nvcc, arch):
    """The kernels' PTX for an architecture, judged; and what ptxas makes of it: the file, its entries, the spills."""
    source = context.root / "csrc" / "kernel" / "launch_cuda.cu"
    ptx, cubin = folder / f"launch_cuda_{arch}.ptx", folder / f"launch_cuda_{arch}.cubin"
    flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", f"-I{context.root / 'csrc'}"]
    context.run([nvcc, *flags, f"-arch=compute_{arch}", "-ptx", source, "-o", ptx], "nvcc -ptx")
    shut_if(text_breaches(ptx.read_text()), f"things wrong with the kernels' PTX for {arch}")
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    log = context.run([ptxas, "-v", "--fmad=false", f"-arch=sm_{arch}", ptx, "-o", cubin], "ptxas")
    entries, spilled = resources(log)
    if not entries:
        raise Failed("ptxas names no kernel", log[-2000:])
    return cubin, entries, spilled


def start_gpucheck(context, program):
    """What `nvx gpucheck` runs on a machine with GPUs: it links, starts, and without one says so, as processes too."""
    for part in ("facts", "correct", "processes"):
        said = context.run([program, part, "--seconds", "20"], f"nvx_gpucheck {part}")
        if not re.search(r'"end": "(skipped|passed)"', said):
            raise Failed(f"nvx_gpucheck {part} says neither that it passed nor that it was skipped", said[-2000:])


def sass(context, cubins):
    """What the machine code itself says, where cuobjdump can show it."""
    tool = context.tool("cuobjdump")
    if not tool:
        return "machine code not looked into: no cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)"
    helped = dict(os.environ, PATH=f"{pathlib.Path(tool).parent}:{os.environ['PATH']}")  # by nvdisasm beside it
    told = []
    for cubin, arch in zip(cubins, LOOKED_INTO, strict=True):
        code = context.run([tool, "-sass", cubin], "cuobjdump", env=helped)
        wide = len(re.findall(r"\bLDG?\.E\S*\.128\b", code))
        system = len(re.findall(r"\bSTG?\.E\S*\.SYS\b|\bMEMBAR\.\S*\.SYS\b", code))
        lacks = [what for what, n in (("loads of 16 bytes", wide), ("system-scope stores", system)) if not n]
        shut_if(lacks, f"things missing in the machine code for {arch}")
        told.append(f"sm_{arch}: {wide} loads of 16 bytes, {system} system-scope stores and fences")
    return "machine code of " + "; ".join(told)


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
