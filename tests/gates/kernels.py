"""Checks of the CUDA kernels that need no device: they compile for every architecture, and their code has the memory
accesses that the protocol relies on."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil

from builds import GCC, HALF_NOTE, compile_all, configure, half_of
from common import Failed, Skipped, shut_if

# Patterns that PTX must have, and the reasons.
WANTED = (
    (r"\bld\.relaxed\.sys\.v2\.u64\b", "packets are read in one access of 16 bytes"),
    (r"\bst\.relaxed\.sys\.v2\.u64\b", "packets are written in one access of 16 bytes"),
    (r"\bld\.acquire\.sys\.b64\b", "counters of peers are acquired at system scope"),
    (r"\bst\.release\.sys\.b64\b", "counters for peers are released at system scope"),
    (r"\bfence\.acq_rel\.sys\b", "one fence of system scope publishes a round"),
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
# Those of reduce_multicast().
MULTICAST = (
    (r"\bmultimem\.ld_reduce\.relaxed\.sys\.add\.v4\.f32\b", "the switch adds float32"),
    (r"\bmultimem\.ld_reduce\.relaxed\.sys\.add\.acc::f32\.v4\.bf16x2\b", "the switch adds bfloat16 in float32"),
    (r"\bmultimem\.ld_reduce\.relaxed\.sys\.add\.acc::f32\.v4\.f16x2\b", "the switch adds float16 in float32"),
    (r"\bmultimem\.st\.relaxed\.sys\.v4\.f32\b", "sums are stored to all ranks, 16 bytes at a time"),
    (r"\bfence\.proxy\.alias\b", "a part is reached at two addresses"),
)
# A round's end, PushChannel::publish(), without accesses of memory that a thread or a block has for itself: tests/model
# proves the protocol of this order.
PUBLISH = (r"bar\.red\.and\.pred", r"fence\.acq_rel\.sys", r"st\.relaxed\.sys\.b64", r"st\.relaxed\.sys\.b64")
# Patterns that the machine code must have after all optimisation.
WANTED_CODE = (
    (r"\bLDG?\.E\.128\.STRONG\.SYS\b", "reads of packets"),
    (r"\bSTG?\.E\.128\.STRONG\.SYS\b", "writes of packets"),
    (r"\bLDG?\.E\.64\.STRONG\.SYS\b", "reads of counters"),
    (r"\bSTG?\.E\.64\.STRONG\.SYS\b", "writes of counters"),
    (r"\bLDG?\.E\.128(?!\.STRONG)", "reads of chunks"),
    (r"\bSTG?\.E\.128(?!\.STRONG)", "writes of chunks"),
    (r"\bMEMBAR\.\S*\.SYS\b", "fences"),
)
# The architectures for which a wheel has machine code. On others the driver compiles the PTX of the oldest.
ARCHITECTURES = ("80", "90", "100", "120")
PTX = "80"
OLDEST = "75"  # the oldest that TORCH_CUDA_ARCH_LIST may name and CUDA 13 compiles for; its resources are not checked
MOST_REGISTERS = 128  # 512 lanes a block

# Hot kernels: one algorithm and type each. On the path of an operation that succeeds, state is in registers and nothing
# is called. Cold functions are off that path; so is the code between two of their calls that is reached only by them.
# The slow path of a division serves operands at the ends of the range of float32.
COLD = ("record", "check_wait", "mismatch", "restamp", "signal_peers")
SLOW_DIVISION = r"__cuda_sm\w+_slowpath"
MOST_INSTRUCTIONS = 4000
MOST_FENCES = 2  # of system scope: one before `ready`, which only chunks signal, and one a round
MOST_LOADS_FIRST = 3  # the epoch; the peer's last one, if it was not met in the one before; its digest
MOST_GENERAL = 10000  # a general kernel with all that it calls; with a copy of everything for each type, 54,832
HOT_PARTS = (
    "reduce_packets",
    "reduce_packets_two_shot",
    "reduce_chunks",
    "exchange_packets",
    "exchange_chunks",
    "exchange_pieces",
)  # in the order of DeviceAlgorithm
HOT_TYPES = {"v": "", "f": " f32", "B": " bf16", "S": " f16"}
BUILT_FOR = "9.0"  # CMake builds this one only: each other one would take as long again, and is compiled below

FIGURES = "bench/results/kernels.json"
BEGIN, END = "<!-- made by tests/gates/run cuda --fix -->\n", "<!-- end of the table -->\n"


def text_breaches(ptx):
    """The faults of PTX, a sentence each."""
    found = [f"nowhere {pattern}: {why}" for pattern, why in WANTED if not re.search(pattern, ptx)]
    for pattern, why in UNWANTED:
        hit = re.search(pattern, ptx, re.MULTILINE)
        if hit:
            found.append(f"{hit.group(0).strip()}: {why}")
    return found + order_breaches(ptx) + hot_breaches(ptx)


def order_breaches(ptx):
    """The fences around which PTX has another order than PUBLISH, a sentence each."""
    accesses = re.findall(r"\b(?:ld|st|atom|red|bar|fence)\.(?!local|shared|param|const)[\w.]+", ptx)
    around = [accesses[max(i - 1, 0) : i + 3] for i, one in enumerate(accesses) if one.startswith("fence.")]
    return [
        f"{' '.join(one)}: a fence stands between the tile's barrier and the flags"
        for one in around
        if len(one) != len(PUBLISH) or not all(map(re.fullmatch, PUBLISH, one))
    ]


def hot_breaches(ptx):
    """The faults that slow hot kernels, in PTX, a sentence each. Cold functions are not part of a kernel's text."""
    found = []
    for symbol, body in re.findall(r"\.entry (\w+)\((.*?)^\}", ptx, re.DOTALL | re.MULTILINE):
        name = kernel_of(symbol)
        if name in ("single", "several"):
            continue
        if hit := re.search(r"\b(div|rem)\.[us]\d+", body):
            found.append(f"{name}: {hit[0]}: an integer division")
        if "packets" in name and (hit := re.search(r"(?<![\w.])(atom|red)\.[\w.]+", body)):
            found.append(f"{name}: {hit[0]}: an atomic access")
        if (loads := loads_first(body)) > MOST_LOADS_FIRST:
            found.append(f"{name}: {loads} loads, each of which needs the one before, precede the first packet")
    return found


def loads_first(body):
    """The longest chain of loads before a kernel's first packet in which each needs the value of the one before. A
    value from shared memory may need all loads before the last barrier."""
    chains, behind = {}, 0

    def longest(registers):
        return max((chains.get(one, 0) for one in re.findall(r"%\w+", registers)), default=0)

    for line in body.splitlines():
        if "st.relaxed.sys.v2" in line:
            return max(behind, longest(line))
        if "bar." in line:
            behind = max(chains.values(), default=0)
        if step := re.match(r"\s*(?:@\S+\s+)?([a-z][\w.]+)\s+(\{[^}]*\}|%\w+),(.*);", line):
            what, to, of = step.groups()
            is_load = re.match(r"ld\.(?!param|const|local|shared)", what)
            chain = behind if what.startswith(("ld.shared", "bar.")) else longest(of) + bool(is_load)
            chains |= {one: max(chains.get(one, 0), chain) for one in re.findall(r"%\w+", to)}
    return 0


def code_breaches(code):
    """The faults of machine code, a sentence each."""
    return [f"nowhere {pattern}: {what}" for pattern, what in WANTED_CODE if not re.search(pattern, code)]


def kernel_of(symbol):
    """The name of a kernel, from its mangled one."""
    if hot := re.search(r"DeviceAlgorithmE(\d)E(?:NS\d?_?\d?_?5plain\d+)?(\w)", symbol):
        return HOT_PARTS[int(hot[1])] + HOT_TYPES[hot[2]]
    several = re.search(r"KernelArgsILm(\d+)E", symbol)
    return "single" if not several or several[1] == "1" else "several"


def kernels_in(code):
    """From nvdisasm -c: the name of each kernel, the instructions of its own text in basic blocks, as (label,
    instructions), and how many instructions it has with all that it calls."""
    for part in re.split(r"\n//-+ \.text\.", code)[1:]:
        name, blocks, total, own = "", [(None, [])], 0, False
        for line in part.splitlines():
            if begin := re.match(r"(_Z\w+):$", line):
                name, own = begin[1], True
            elif re.match(r"\$.*:$", line):
                own = False
            elif own and (label := re.match(r"\.(L_x_\d+):", line)):
                blocks.append((label[1], []))
            elif (found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?) ;", line)) and found[1] != "NOP":
                total += 1
                if own:
                    blocks[-1][1].append(found[1])
                    if re.search(r"\b(BRA|EXIT|RET|CALL)\b", found[1]):
                        blocks.append((None, []))
        if name:
            yield kernel_of(name), blocks, total


def path_of(blocks):
    """The instructions that are reached from the first block without a call of a cold function."""
    at = {label: i for i, (label, _) in enumerate(blocks) if label}
    cold = re.compile(r"CALL.*\d(" + "|".join(COLD) + r")[A-Z]")
    seen, todo = set(), [0]
    while todo:
        i = todo.pop()
        if i in seen or i >= len(blocks) or any(map(cold.search, blocks[i][1])):
            continue
        seen.add(i)
        last = blocks[i][1][-1] if blocks[i][1] else ""
        if target := re.search(r"`\(\.(L_x_\d+)\)", last):
            todo += [at[target[1]]] if target[1] in at else []
        ends = re.match(r"(BRA|EXIT|RET)\b", last) and not re.match(r"BRA\.\w+\s+\S*P|BRA\s+!?U?P\d", last)
        todo += [] if ends else [i + 1]
    return [re.sub(r"^@!?U?P\w+\s+", "", line) for i in sorted(seen) for line in blocks[i][1]]


def costs_of(path):
    """Counts the instructions on the path of an operation."""

    def count(pattern):
        return sum(1 for line in path if re.match(pattern, line))

    return {
        "path": len(path),
        "local": count(r"(LDL|STL)\b"),
        "calls": sum(1 for line in path if re.match("CALL", line) and not re.search(SLOW_DIVISION, line)),
        "fences": count(r"MEMBAR\.\S*SYS"),
        "loads16": count(r"LDG?\.E\.128"),
        "stores16": count(r"STG?\.E\.128"),
    }


def path_breaches(kernels):
    """The excesses of kernels, from (name, costs, instructions in all), a sentence each."""
    found = []
    for name, costs, total in kernels:
        if name in ("single", "several"):
            found += [f"{name}: {total} instructions"] if total > MOST_GENERAL else []
            continue
        found += [f"{name}: {costs['path']} instructions on its path"] if costs["path"] > MOST_INSTRUCTIONS else []
        found += [f"{name}: {costs['local']} accesses of local memory on its path"] if costs["local"] else []
        found += [f"{name}: {costs['calls']} calls on its path"] if costs["calls"] else []
        found += [f"{name}: {costs['fences']} system fences on its path"] if costs["fences"] > MOST_FENCES else []
        wide = 8 if "chunks" in name or "pieces" in name else 4
        found += [f"{name}: only {costs['loads16']} loads of 16 bytes"] if costs["loads16"] < wide else []
    return found


def resources(log):
    """The resources of each kernel from ptxas -v: a dictionary with its name, architecture, registers and stack, and
    the bytes that it and the functions that it calls spill."""
    entries = []
    for line in log.splitlines():
        if begin := re.search(r"Compiling entry function '(\w*run_\w+)' for 'sm_(\w+)'", line):
            entries.append({"kernel": kernel_of(begin[1]), "architecture": begin[2], "spilled": 0})
        elif entries and (spills := re.search(r"(\d+) bytes spill stores", line)):
            entries[-1]["spilled"] += int(spills[1])
        elif entries and (used := re.search(r"Used (\d+) registers.*?(?:(\d+) bytes cumulative stack size|$)", line)):
            entries[-1] |= {"registers": int(used[1]), "stack": int(used[2] or 0)}
    return entries


def resource_breaches(entries):
    """The kernels' excesses of resources, a sentence each."""
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


def cuda(context):
    """CMake builds the kernels for one architecture; the gate compiles and inspects them for every one, in CI for that
    one and another."""
    nvcc = find_nvcc()
    half = None if context.fix else half_of()
    compiled = ARCHITECTURES if half is None else (("80", "90"), ("90", "120"))[half]
    inspected = (*compiled, OLDEST) if half is None else compiled
    folder = context.build_dir / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        built = pool.submit(by_cmake, context, folder)
        found = list(pool.map(lambda arch: assemble(context, folder, nvcc, arch), inspected))[: len(compiled)]
        list(pool.map(lambda arch: assemble_multicast(context, folder, nvcc, arch), inspected))
    results = [built.result()]
    entries = [entry for _, some in found for entry in some]
    shut_if(resource_breaches(entries), "kernels that use too much")
    results.append(keep_figures(context, nvcc, entries))
    results.append(sass(context, {arch: cubin for arch, (cubin, _) in zip(compiled, found, strict=True)}))
    return "; ".join(filter(None, results)) + HALF_NOTE * (compiled is not ARCHITECTURES)


def by_cmake(context, folder):
    listed = re.search(r"set\(architectures ([\w -]+)\)", context.read("cmake/cuda.cmake"))
    wanted = [*(f"{one}-real" for one in ARCHITECTURES), f"{PTX}-virtual"]
    if not listed or listed[1].split() != wanted:
        raise Failed(f"cmake/cuda.cmake builds for other architectures than {' '.join(wanted)}")
    version = re.search(r"version (\d+)\.(\d+)", context.run(["cmake", "--version"], "cmake"))
    if version and (int(version[1]), int(version[2])) < (3, 26):
        return "by CMake not built, which is older than 3.26 (pip install cmake)"
    tests = ("-DNVX_TESTS=ON", f"-DTORCH_CUDA_ARCH_LIST={BUILT_FOR}")
    configure(context, "cuda", *GCC, "-DNVX_CUDA=ON", *tests)
    compile_all(context, folder, "nvx_cuda", "nvx_gpu", "kernel_cuda_test")
    start_program(context, folder / "nvx_gpu", "facts", "correct", "processes")
    return ""


def assemble(context, folder, nvcc, arch):
    """Checks the kernels' PTX for an architecture and assembles it; returns the file and the resources of its
    kernels."""
    source = context.root / "csrc" / "kernel" / "gpu" / "launch_cuda.cu"
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


def assemble_multicast(context, folder, nvcc, arch):
    """The same for the kernels of reduce_multicast(). Before sm_90 they have no instructions for multicast."""
    source = context.root / "csrc" / "kernel" / "gpu" / "multicast.cu"
    ptx, cubin = folder / f"multicast_{arch}.ptx", folder / f"multicast_{arch}.cubin"
    flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", f"-I{context.root / 'csrc'}"]
    context.run([nvcc, *flags, f"-arch=compute_{arch}", "-ptx", source, "-o", ptx], "nvcc -ptx")
    text = ptx.read_text()
    wanted = MULTICAST if int(arch) >= 90 else ()
    breaches = [f"nowhere {pattern}: {why}" for pattern, why in wanted if not re.search(pattern, text)]
    breaches += [f"{pattern}: {why}" for pattern, why in UNWANTED if re.search(pattern, text, re.MULTILINE)]
    breaches += order_breaches(text.replace("fence.proxy.alias", ""))
    shut_if(breaches, f"things wrong with the PTX of multicast.cu for {arch}")
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    log = context.run([ptxas, "-v", "--fmad=false", f"-arch=sm_{arch}", ptx, "-o", cubin], "ptxas")
    used = [int(one) for one in re.findall(r"Used (\d+) registers", log)]
    if len(used) != 3 or max(used) > MOST_REGISTERS or re.search(r"[1-9]\d* bytes spill", log):
        raise Failed(f"multicast.cu for sm_{arch}: registers {used}, or spills", log[-2000:])


def figures_table(figures):
    """The kernels' resources, as the table of docs/gpu-evidence.md."""
    rows = []
    for name in sorted({one["kernel"] for one in figures["kernels"]}):
        entries = [one for one in figures["kernels"] if one["kernel"] == name]
        most = [str(max(one[what] for one in entries)) for what in ("registers", "stack", "spilled")]
        rows.append(f"| `{name}` | {' | '.join(most)} |\n")
    built = ", ".join(f"sm_{one}" for one in sorted({int(one["architecture"]) for one in figures["kernels"]}))
    head = "| kernel | registers | stack | spilled |\n|---|---|---|---|\n"
    text = f"With nvcc {figures['nvcc']}, the most of {built}; stack and spills in bytes:"
    return f"{BEGIN}{text}\n\n{head}{''.join(rows)}{END}"


def keep_figures(context, nvcc, entries):
    """The figures file and the table made from it hold the resources under this compiler. Another compiler's figures
    are not compared."""
    version = re.search(r"\bV([\d.]+)", context.run([nvcc, "--version"], "nvcc"))
    figures = {"schema": 1, "what": "kernels", "command": "tests/gates/run cuda --fix", "nvcc": version[1]}
    figures |= {"kernels": entries}
    seen = {one["architecture"] for one in entries}
    file, page = context.root / FIGURES, context.root / "docs" / "gpu-evidence.md"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    if context.fix and kept != figures:
        file.write_text(json.dumps(figures, indent=1) + "\n")
        kept = figures
    text = page.read_text()
    if kept and figures_table(kept) not in text:
        if not context.fix:
            raise Failed(f"docs/gpu-evidence.md is not what {FIGURES} says; run: tests/gates/run cuda --fix")
        page.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", figures_table(kept), text, flags=re.DOTALL))
    comparable = [one for one in kept.get("kernels", ()) if one["architecture"] in seen]
    if kept.get("nvcc") == figures["nvcc"] and comparable != entries:
        raise Failed(f"{FIGURES} is not what the kernels use by now; run: tests/gates/run cuda --fix")
    return f"at most {max(one['registers'] for one in entries)} registers, none spilled"


def start_program(context, program, *parts):
    """The program of the GPU tests links and starts. Without a GPU it reports that, for processes too."""
    for part in parts:
        printed = context.run([program, part, "--seconds", "20"], f"nvx_gpu {part}")
        if not re.search(r'"end": "(skipped|passed)"', printed):
            raise Failed(f"nvx_gpu {part} says neither that it passed nor that it was skipped", printed[-2000:])


def sass(context, cubins):
    """Checks the machine code itself."""
    tool = context.tool("cuobjdump")
    if not tool:
        raise Failed("no cuobjdump for the machine code (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    # Cuobjdump calls nvdisasm, which is beside it.
    helped = dict(os.environ, PATH=f"{pathlib.Path(tool).parent}:{os.environ['PATH']}")
    results = [paths(context, cubins["90"], tool)]
    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        disassembled = pool.map(
            lambda cubin: context.run([tool, "-sass", cubin], "cuobjdump", env=helped), cubins.values()
        )
        codes = dict(zip(cubins, disassembled, strict=True))
    for arch, code in codes.items():
        shut_if(code_breaches(code), f"things missing in the machine code for {arch}")
        results.append(f"sm_{arch} " + "/".join(str(len(re.findall(pattern, code))) for pattern, _ in WANTED_CODE))
    return f"machine code ({', '.join(what for _, what in WANTED_CODE)}): " + ", ".join(results)


def paths(context, cubin, cuobjdump):
    """Checks the paths of hot kernels in the machine code for sm_90."""
    tool = pathlib.Path(cuobjdump).with_name("nvdisasm")
    if not tool.exists():
        raise Failed("no nvdisasm to look into the paths of hot kernels (pip install nvidia-cuda-nvdisasm)")
    code = context.run([tool, "-c", cubin], "nvdisasm")
    kernels = [(name, costs_of(path_of(blocks)), total) for name, blocks, total in kernels_in(code)]
    table = "".join(f"  {name}: {total} instructions; on the path {costs}\n" for name, costs, total in sorted(kernels))
    (context.build_dir / "cuda" / "paths.txt").write_text(table)
    shut_if(path_breaches(kernels), "kernels that cost too much")
    longest = max(costs["path"] for name, costs, _ in kernels if name not in ("single", "several"))
    return f"hot kernels have at most {longest} instructions on their paths (build/gates/cuda/paths.txt)"


# (PTX, whether it is a breach)
GOOD = """ld.relaxed.sys.v2.u64 st.relaxed.sys.v2.u64 ld.acquire.sys.b64 st.release.sys.b64
ld.v2.u64 st.v2.u64 mul.rn.f32
bar.red.and.pred ld.shared.u32 fence.acq_rel.sys st.relaxed.sys.b64 st.shared.u64 st.relaxed.sys.b64"""
# A hot kernel up to its first packet: three loads, each of which needs the one before.
ENTRY_PTX = """
.visible .entry _ZN3nvx7run_hotINS0_12HotOperationILNS0_15DeviceAlgorithmE0EfEEEE(
)
{
\tld.param.u64 %rd1, [args];
\tld.global.u64 %rd2, [%rd1+8];
\tbar.red.and.pred %p1, 0, %p2;
\tadd.s64 %rd3, %rd2, %rd1;
\tld.global.u32 %r3, [%rd3];
\tshl.b32 %r4, %r3, 1;
\tcvt.u64.u32 %rd4, %r4;
\tld.acquire.sys.b64 %rd5, [%rd4];
\tst.relaxed.sys.v2.u64 [%rd5], {%rd1, %rd2};
\tbar.red.and.pred %p1, 0, %p2;
}
"""
EXAMPLES = (
    (GOOD, False),
    (GOOD.replace("acquire.sys", "acquire.gpu"), True),
    (GOOD.replace("ld.relaxed.sys.v2.u64", "ld.relaxed.sys.u64"), True),
    (GOOD.replace("acq_rel.sys", "acq_rel.gpu"), True),
    (GOOD.replace("bar.red.and.pred", "st.v2.u64"), True),
    (GOOD.replace("st.shared.u64 st.relaxed", "st.u64 st.relaxed"), True),
    (GOOD + " fma.rn.f32", True),
    (GOOD + " add.ftz.f32", True),
    (GOOD + " div.approx.f32", True),
    (GOOD + "\n    @%p1 trap;", True),
    (GOOD + " ld.volatile.u64", True),
    (GOOD + " ld.global.nc.v4.u32", True),
    (GOOD + ENTRY_PTX, False),
    (GOOD + ENTRY_PTX.replace("shl.b32 %r4, %r3, 1", "div.u32 %r4, %r3, %r2"), True),
    (GOOD + ENTRY_PTX.replace("shl.b32 %r4, %r3, 1", "atom.add.acq_rel.gpu.u32 %r4, [%rd4], 1"), True),
    (GOOD + ENTRY_PTX.replace("add.s64 %rd3, %rd2, %rd1", "ld.global.u64 %rd3, [%rd2]"), True),
    (GOOD + ENTRY_PTX.replace("add.s64 %rd3, %rd2, %rd1", "ld.shared.u64 %rd3, [%r1]"), False),
    (GOOD + ENTRY_PTX.replace("add.s64 %rd3, %rd2, %rd1", "ld.shared.u64 %rd9, [%r1];\nld.u64 %rd3, [%rd9]"), True),
    (GOOD + ENTRY_PTX.replace("DeviceAlgorithm", "").replace("shl.b32", "div.u32"), False),
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

# Machine code of a hot kernel: a path, a call of a cold function, and the function.
HOT = """
//--------------------- .text._ZN3nvx12run_hot_kindINS0_12HotOperationILNS0_15DeviceAlgorithmE0EfEEEE
_ZN3nvx12run_hot_kindINS0_12HotOperationILNS0_15DeviceAlgorithmE0EfEEEE:
        /*0000*/                   LDG.E.128 R4, [R2] ;
        /*0010*/                   LDG.E.128 R8, [R2] ;
        /*0020*/                   LDG.E.128 R12, [R2] ;
        /*0030*/                   LDG.E.128 R16, [R2] ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   MEMBAR.ALL.SYS ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   STL [R1], R2 ;
        /*0080*/                   CALL.REL.NOINC `($_ZN3nvx12run_hot$_ZN3nvx8TileExec6recordES2_) ;
        /*0090*/                   EXIT ;
$_ZN3nvx12run_hot$_ZN3nvx8TileExec6recordES2_:
        /*00a0*/                   STL [R1], R2 ;
"""
# (machine code, whether it is a breach)
PATH_EXAMPLES = (
    (HOT, False),
    (HOT.replace("MEMBAR.ALL.SYS ;", "STL [R1], R2 ;"), True),
    (HOT.replace("6record", "4fold"), True),
    (HOT.replace("LDG.E.128 R4", "MEMBAR.SC.SYS ;\n        /*0008*/    " * 2 + "LDG.E.128 R4"), True),
    (HOT.replace("LDG.E.128 R16", "LDG.E.64 R16"), True),
)


def path_faults(code):
    """path_breaches() of machine code."""
    return path_breaches([(name, costs_of(path_of(blocks)), total) for name, blocks, total in kernels_in(code)])


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
