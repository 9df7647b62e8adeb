"""Gates that compile. Every variant is a CMake build of the core and its tests (no torch) in a folder of its own, so
a second run compiles only changed files."""

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from common import Failed, LeftOut, Skipped, shut_if

CLANG = ("-DCMAKE_CXX_COMPILER=clang++-14", "-DCMAKE_C_COMPILER=clang-14")


def _gcc():
    """gcc, under the name that CMake uses by default: ccache hashes the compiler's name too, so files that `make
    test` has compiled are not compiled again."""
    try:
        printed = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return "g++"
    return "c++" if "Free Software Foundation" in printed else "g++"


GCC = (f"-DCMAKE_CXX_COMPILER={_gcc()}", "-DCMAKE_C_COMPILER=gcc")

# Of a sanitizer. A test that fails without one may have been too slow.
REPORT = re.compile(r"(ERROR|WARNING|SUMMARY|FATAL): \w+Sanitizer|runtime error:")

# Of a process of a test that crashed, or of a wrong result; scripts/test.sh has the same words.
FINAL = re.compile(
    r"(exit code|ended with|assert) -(4|6|7|8|11)\b|signal (4|6|7|8|11)\b"
    r"|wrong, first at [0-9]|wrong result of [^{]|wrong output|wrote outside (its|the) "
    r"|changed its input|has another byte at"
)

# LeakSanitizer could not stop the threads at the program's exit, so it has not looked for leaks.
NOT_SEARCHED = "LeakSanitizer has encountered a fatal error"

# There are no suppressions: a sanitizer's finding in our code is fixed, not muted.
SANITIZER_RULES = {
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:detect_leaks=1:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
}


def configure(context, variant, *options):
    """Configures the core in a folder of its own and returns the folder."""
    folder = context.build_dir / variant
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (context.root / "CMakeLists.txt").is_file():
        raise Skipped("no CMakeLists.txt here")
    cache = folder / "CMakeCache.txt"
    if cache.is_file() and not any(str(one) in cache.read_text() for one in (folder, folder.resolve())):
        shutil.rmtree(folder)  # of a checkout that was moved: CMake refuses it
    common = ["-DNVX_WERROR=ON", "-DNVX_PYTHON=OFF"]
    command = ["cmake", "-S", context.root, "-B", folder, *generator, *common, *options]
    context.run(command, "configuring")
    return folder


def compile_all(context, folder, *targets):
    wanted = ["--target", *targets] if targets else []
    context.run(["cmake", "--build", folder, "--parallel", str(context.jobs), *wanted], "compiling")


def build(context, variant, *options, targets=()):
    folder = configure(context, variant, "-DNVX_TESTS=ON", *options)
    compile_all(context, folder, *targets)
    return folder


def run_tests(context, folder, wrapper=(), minutes=20, components=()):
    """Runs the gtest programs of a build, or of some of its components, and reports how many tests passed. A failure
    includes the program's last output."""
    programs = sorted(p for p in folder.glob("*_test") if os.access(p, os.X_OK) and p.is_file())
    programs = [p for p in programs if not components or p.name.removesuffix("_test") in components]
    if not programs:
        raise Skipped("there are no C++ tests to run")
    parts = [part for program in programs for part in parts_of(program, context.jobs)]
    parts.sort(key=lambda part: part.of, reverse=True)
    environment = {**os.environ, **SANITIZER_RULES, "GTEST_BRIEF": "1", "GTEST_FAIL_FAST": "1"}
    again = []

    def run(part):
        program = part.program
        command = [*wrapper, str(program)]
        shard = {"GTEST_TOTAL_SHARDS": str(part.of), "GTEST_SHARD_INDEX": str(part.number)}
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=minutes * 60,
                env=environment | shard,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode(errors="replace")
            raise Failed(f"{program.name} took more than {minutes} minutes", printed[-4000:]) from None
        if done.returncode != 0:
            reported = REPORT.search(done.stdout) or FINAL.search(done.stdout)
            once_more = NOT_SEARCHED in done.stdout or (done.returncode == 1 and os.environ.get("SECOND_TRY"))
            if once_more and not reported and part not in again:
                again.append(part)
                print(relevant_lines(done.stdout), flush=True)
                return run(part)
            raise Failed(f"{program.name} failed (exit code {done.returncode})", relevant_lines(done.stdout))
        return [sum(map(int, re.findall(rf"{end}\s+\] (\d+) test", done.stdout))) for end in ("PASSED", "SKIPPED")]

    # Many of the tests wait, for each other and for timeouts, so more than there are cores run at once.
    with concurrent.futures.ThreadPoolExecutor(context.jobs + 2) as pool:
        passed, skipped = map(sum, zip(*pool.map(run, parts), strict=True))
    if passed == 0:
        raise Failed("the test programs ran no test")
    note = f"{passed} tests in {len(programs)} programs" + (f", {skipped} skipped" if skipped else "")
    return note + (f"; {len(again)} programs passed only the second time" if again else "")


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the shards in which a test program runs."""

    program: pathlib.Path
    number: int
    of: int


def parts_of(program, cores):
    """The programs that take longest are split, so no core is idle at the end."""
    of = {"group_test": 2 * cores, "kernel_test": cores, "memory_test": cores, "net_test": cores}.get(program.name, 1)
    return [Part(program, number, of) for number in range(of)]


def relevant_lines(output):
    """A failed program's first complaint, with two lines before it, and its last output."""
    lines = [line for line in output.splitlines() if line.strip() and "Skipped" not in line]
    complaint = re.compile(r": Failure|Sanitizer|runtime error|terminate called|Assertion")
    first = next((i for i, line in enumerate(lines) if complaint.search(line)), len(lines))
    first = max(first - 2, 0)
    return "\n".join(lines[first : first + 70] + ["..."] + lines[max(first + 70, len(lines) - 10) :])


# `make test` runs the tests that gcc compiled. clang compiles them all for asan, with the same warnings as errors.
def gcc(context):
    build(context, "gcc", *GCC)
    return "no warning"


# These options compile in half the time of -O2 -g, and the sanitizer sees as many accesses.
QUICK = ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG")


# Large grids take most of the time, and show a sanitizer or another processor no more than small ones do.
LARGE_GRIDS = ":".join(f"Ranks/*/{ranks}_from_*" for ranks in (4, 6, 7, 8)) + ":Ranks/HotKernels.*/4"  # of nine ranks


# These tests compute on one thread: `make test` runs them all, and other tests run the same functions here.
COMPUTED = "Catalog/Proof.*:Simulation.*:Simulate.*:Slices.*:Mutation.*"


def without(*filters):
    """The wrapper that excludes tests."""
    return ("env", f"GTEST_FILTER=-{':'.join(filters)}")


HALF_NOTE = "; a half (CI_SHARD)"


def shard():
    """CI_SHARD, 0 to 3, which CI sets; None without it: then a gate checks everything."""
    given = os.environ.get("CI_SHARD")
    return int(given) if given else None


def half_of():
    """The half of a gate's tests that this shard runs: those whose index has this parity; None: all."""
    return None if shard() is None else shard() % 2


def leave_out_unless(half):
    """The gates of one sanitizer run in each half, since each sanitizer compiles the core anew."""
    if half_of() not in (None, half):
        raise LeftOut("it runs for every second commit (CI_SHARD)")


def of_shard(components):
    """The components that a sanitizer tests in this shard. The tests of `group` take as long as all others."""
    if shard() is None:
        return components
    return [component for component in components if (component == "group") == (shard() >= 2)]


# The protocol between ranks does not depend on the type of the elements.
OF_EVERY_TYPE = "Types/Reduce.*:Ranks/Grid.*Type*"


# TSan has nothing to check in schedules: they run on one thread.
def tsan(context):
    leave_out_unless(1)
    components = [component for component in of_shard(tested_components(context)) if component != "schedule"]
    programs = [f"{component}_test" for component in components]
    folder = build(context, "tsan", *GCC, "-DNVX_SANITIZE=thread", *QUICK, targets=programs)
    wrapper = without(OF_EVERY_TYPE, LARGE_GRIDS, COMPUTED)
    return run_tests(context, folder, wrapper=wrapper, components=components)


def tested_components(context):
    """The components that have C++ tests, one program each."""
    return sorted({f.parts[1] for f in context.sources(".cc", under=("tests",)) if f.stem.endswith("_test")})


# One build serves the tests and the fuzz targets, because the core is most of both.
SANITIZED = ("-DNVX_SANITIZE=address,undefined", "-DNVX_FUZZ=ON", *QUICK)


def asan(context):
    leave_out_unless(0)
    components = of_shard(tested_components(context))
    programs = [f"{component}_test" for component in components]
    folder = build(context, "asan", *CLANG, *SANITIZED, targets=programs)
    wrapper = without(LARGE_GRIDS, COMPUTED)
    return run_tests(context, folder, wrapper=wrapper, components=components)


def look_for_torch(context):
    """The torch of this interpreter, as find_torch.py writes it; empty without torch."""
    found = subprocess.run(
        [sys.executable, context.root / "cmake" / "find_torch.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout if found.returncode == 0 else ""


def simulated(context):
    """The kernels behind torch's own interface, on a simulated device."""
    if not look_for_torch(context):
        raise Skipped("this python has no torch")
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("this python has no pytest")
    # Ranks wait for most of their time, so one more file than there are cores runs at once.
    parallel = ("-n", str(min(context.jobs + 1, 8)), "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()
    output = context.build_dir / "simulated" / "nvx"
    torch = ("-DNVX_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}", f"-DNVX_OUTPUT_DIR={output}")
    folder = configure(context, "simulated", *GCC, *torch, "-DNVX_SIMULATED=ON")
    compile_all(context, folder, "_C", "nvx_fake_cuda")
    tests = [context.root / "tests" / "torch", "-m", "simulated"]
    surroundings = {**os.environ, "NVX_SIMULATED_DIR": str(folder), "PYTHONPATH": str(context.root / "python")}
    if (half := half_of()) is not None:
        surroundings["NVX_TEST_HALF"] = str(half)
    cache, again = folder / "pytest", ""
    report = folder / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--timeout", "600", "-o", f"cache_dir={cache}"]
    command += [f"--junitxml={report}", *parallel, *tests]
    shutil.rmtree(cache, ignore_errors=True)
    try:
        printed = context.run(command, "testing", env=surroundings)
    except Failed as failed:
        tests_failed = os.environ.get("SECOND_TRY") and "(exit code 1)" in failed.summary
        if not tests_failed or FINAL.search(report.read_text()):
            raise
        print(failed.details, flush=True)
        again = "; others passed before, these only the second time"
        lost = (*(("-n", "0") if parallel else ()), "--last-failed", "--last-failed-no-failures", "none")
        printed = context.run([*command, *lost], "testing", env=surroundings)
    shut_if(["its tests were skipped"] if "passed" not in printed else [], "nothing was tried")
    return printed.strip().splitlines()[-1].strip("= ") + again + HALF_NOTE * ("NVX_TEST_HALF" in surroundings)


# Nine in ten files read these anyway, through their own headers. Precompiled, they take a third of the gate's time.
EVERYWHERE = "algorithm chrono functional memory optional string system_error unordered_map vector".split()


def compiler_words(command):
    """A command of compile_commands.json without its output."""
    words = shlex.split(command["command"])
    words = words[next(i for i, word in enumerate(words) if "clang++" in word) :]
    output = words.index("-o")
    return [*words[:output], *words[output + 2 :]]


def alone(context):
    """Other builds compile files of a component together. Here clang checks each file of the core alone, so no file
    depends on the includes of a neighbour. It checks the module's files a dozen at a time, because torch's headers
    take long even where they are precompiled."""
    if not shutil.which("ninja"):
        raise Skipped("not installed: ninja")
    torch = look_for_torch(context)
    unused = f"-DNVX_OUTPUT_DIR={context.build_dir}/unused"
    python = ("-DNVX_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}", unused)
    quick = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DNVX_UNITY=OFF")
    folder = configure(context, "alone", *CLANG, *quick, *(python if torch else ()))
    commands = json.loads((folder / "compile_commands.json").read_text())
    commands = [c for c in commands if c["file"].startswith(f"{context.root}/csrc/")]
    if torch:
        compile_all(context, folder, "CMakeFiles/_C.dir/cmake_pch.hxx.pch")

    header = folder / "everywhere.h"
    header.write_text("".join(f"#include <{name}>\n" for name in EVERYWHERE))
    of_core = next(c for c in commands if "/csrc/base/" in c["file"])
    words = [word for word in compiler_words(of_core) if word not in ("-c", of_core["file"])]
    context.run([*words, "-x", "c++-header", header, "-o", f"{header}.pch"], "everywhere.h", cwd=folder)

    def look(together):
        *others, command = together
        words = compiler_words(command) + [f"--include={other['file']}" for other in others]
        # It serves one processor only. With it, clang 14 warns of fields of classes that it has not seen whole.
        own = "-include-pch" in words or any(word.startswith("-m") for word in words)
        read = [] if own else ["-include-pch", f"{header}.pch", "-Wno-unused-private-field"]
        context.run([*words, *read, "-fsyntax-only"], command["file"], cwd=folder)

    of_module = [c for c in commands if "/csrc/torch/" in c["file"]]
    batches = [of_module[first : first + 12] for first in range(0, len(of_module), 12)]
    batches += [[c] for c in commands if c not in of_module][half_of() :: 1 if half_of() is None else 2]
    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        list(pool.map(look, batches))
    return f"{sum(map(len, batches))} files" + ("" if torch else "; this python has no torch")


def no_cuda(context):
    """A build as on a machine without nvcc. If this interpreter has torch, the module is built too."""
    found = look_for_torch(context)
    output = context.build_dir / "no_cuda" / "module"
    python = (f"-DPython_EXECUTABLE={sys.executable}", f"-DNVX_OUTPUT_DIR={output}")
    torch = ("-DNVX_PYTHON=ON", *python)
    folder = configure(context, "no_cuda", *GCC, "-DNVX_CUDA=OFF", *(torch if found else ()))
    compile_all(context, folder)
    objects = [p for p in (*output.glob("*.so"), folder / "libnvx_core.a") if p.is_file()]
    for program in objects:
        symbols = context.run(["nm", "-u", program], "nm")
        shut_if(
            sorted(set(re.findall(r"\b(?:cuda[A-Z]|cu[A-Z]|nccl[A-Z])\w+", symbols))),
            f"CUDA symbols in {program.name}",
        )
    return f"with torch {found.split(';')[1]}" if found else "the core alone: this python has no torch"


def no_ucx(context):
    """A build as on a machine without UCX's headers: one host works, and several are refused with the command to
    type."""
    folder = configure(context, "no_ucx", *GCC, "-DNVX_UCX=OFF", "-DNVX_TESTS=ON")
    compile_all(context, folder, "nvx_core", "net_test")
    symbols = context.run(["nm", folder / "libnvx_core.a"], "nm")
    shut_if(sorted(set(re.findall(r"\b(?:ucp|ucs|uct)_\w+", symbols))), "UCX symbols in libnvx_core.a")
    # `make test` runs the rest of these tests over the same code.
    return run_tests(context, folder, wrapper=("env", "GTEST_FILTER=WithoutUcx.*:Links/*loopback*:Links/*tcp*"))


def fuzz(context):
    """Runs every target for `FUZZ_SECONDS`, as many at once as there are cores."""
    leave_out_unless(0)  # which compiles the core for `asan`
    sources = context.sources(".cc", under=("tests",))
    targets = [f.stem for f in sources if f.stem.endswith("_fuzz")]
    if not targets:
        raise Skipped("there is no tests/fuzz/*_fuzz.cc")
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    folder = build(context, "asan", *CLANG, *SANITIZED, targets=targets)

    def run(target):
        corpus, found = folder / "corpus" / target, folder / "found" / target
        for place in (corpus, found):
            place.mkdir(parents=True, exist_ok=True)
        seeds = context.root / "tests" / "fuzz" / "seeds" / target
        command = [
            folder / target,
            f"-max_total_time={seconds}",
            "-timeout=60",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            f"-artifact_prefix={found}/",
            corpus,
            *([seeds] if seeds.is_dir() else []),
        ]
        printed = context.run(command, target, env={**os.environ, **SANITIZER_RULES}, timeout=seconds + 120)
        runs = re.search(r"number_of_executed_units: ([1-9]\d*)", printed)
        if not runs:
            raise Failed(f"{target} has run nothing", printed[-2000:])
        return f"{target.removesuffix('_fuzz')} {int(runs[1]):,} runs"

    with concurrent.futures.ThreadPoolExecutor(context.jobs) as pool:
        return f"{seconds} s each: " + ", ".join(pool.map(run, sorted(targets)))


def aarch64(context):
    if not pathlib.Path("/usr/src/googletest").is_dir():
        raise Skipped("not installed: googletest's sources (--install installs them)")
    toolchain = context.root / "cmake" / "aarch64-linux-gnu.cmake"
    # Other components have no code for one processor only. An emulator on x86-64 does not show another memory order.
    components = ("base", "kernel", "memory", "schedule")
    targets = ("nvx_core", *(f"{component}_test" for component in components))
    folder = build(context, "aarch64", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", targets=targets)
    emulator = (context.tool("qemu-aarch64"), "-L", "/usr/aarch64-linux-gnu")
    wrapper = (*without(LARGE_GRIDS, COMPUTED), "NVX_TEST_EMULATED=1", *emulator)
    return run_tests(context, folder, wrapper=wrapper, components=components)


def docs(context):
    """docs/environment.md holds the table that the registry prints, and the code reads no other variable."""
    folder = configure(context, "gcc", *GCC, "-DNVX_TESTS=ON")
    compile_all(context, folder, "nvx_core")
    program = folder / "print_variables"
    source = context.root / "tests" / "gates" / "print_variables.cc"
    command = [
        "g++",
        "-std=c++20",
        f"-I{context.root / 'csrc'}",
        source,
        folder / "libnvx_core.a",
        "-o",
        program,
        "-pthread",
    ]
    context.run(command, "compiling print_variables.cc")
    table = context.run([program], "print_variables")
    known = set(re.findall(r"`(NVX_\w+)`", table))
    if len(known) > 25:
        raise Failed(f"{len(known)} variables (at most 25)")
    page = context.root / "docs" / "environment.md"
    text = page.read_text() if page.is_file() else "# Environment variables\n\n"
    begin, end = (
        "<!-- made from csrc/base/config.cc by tests/gates/run docs --fix -->\n",
        "<!-- end of the table -->\n",
    )
    wanted = begin + table + end
    if wanted not in text:
        if not context.fix:
            raise Failed("docs/environment.md is not what the registry says; run: tests/gates/run docs --fix")
        kept = re.split(f"{re.escape(begin)}.*?{re.escape(end)}", text, flags=re.DOTALL)
        page.parent.mkdir(exist_ok=True)
        page.write_text((kept[0] + wanted + kept[1]) if len(kept) == 2 else text + wanted)
    shut_if(strays(context, known), "variables that the registry does not know")
    return f"{len(known)} variables"


def strays(context, known):
    """Environment variables of nvx that the tree reads or documents but the registry does not list."""
    reads = re.compile(r"""(?:getenv\(|environ(?:\.get)?[\[(]|setdefault\()\s*["'](NVX_\w+)["']""")
    found = []
    for f in context.sources(".cc", ".h", ".cu", ".py", under=("csrc", "python")):
        for name in set(reads.findall(context.read(f))) - known:
            found.append(f"{f}: reads {name}")
    for f in context.sources(".md"):
        for name in set(re.findall(r"`(NVX_[A-Z0-9_]+)(?:=[^`]*)?`", context.read(f))) - known:
            found.append(f"{f}: mentions {name}")
    return [s for s in found if not re.search("NVX_(TEST|UCX)_", s)]  # NVX_UCX_*: of UCX, or where its headers are
