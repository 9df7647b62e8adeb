"""How many lines of the decoders the committed seeds reach: tests/fuzz/coverage.py [--grow SECONDS].

Builds the fuzz targets with clang's coverage, runs each over `tests/fuzz/seeds/TARGET`, and prints a line for each file
that decodes bytes from elsewhere. `--grow` first fuzzes each target for that long, and keeps the smallest set of inputs
that reaches all that was reached as its new seeds.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"
DECODERS = (
    "base/failure_note.cc",
    "group/meet/topology.cc",
    "group/p2p/mailbox.cc",
    "memory/shm/unix_socket.cc",
    "net/mail.cc",
    "net/messenger.cc",
    "net/segment_flow.cc",
    "net/tcp/tcp_incoming.cc",
    "net/tcp/tcp_outgoing.cc",
    "net/tcp/tcp_wire.cc",
    "net/ucx/ucx_address.cc",
)
COVERAGE = "-fprofile-instr-generate -fcoverage-mapping"


def tool(name):
    return shutil.which(f"{name}-14") or shutil.which(name) or sys.exit(f"coverage.py needs {name}")


def run(*command, **environment):
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **environment}, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def grow(program, seeds, seconds):
    """Leaves small inputs only, so that the repository stays small."""
    found = program.parent / "found" / program.name
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir(parents=True)
    quiet = {"LLVM_PROFILE_FILE": os.devnull}
    run(program, f"-max_total_time={seconds}", "-max_len=2048", "-timeout=60", found, seeds, **quiet)
    kept = seeds.with_suffix(".new")
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    run(program, "-set_cover_merge=1", "-use_counters=0", "-timeout=60", kept, seeds, found, **quiet)
    shutil.rmtree(seeds)
    kept.rename(seeds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grow", type=int, metavar="SECONDS", default=0)
    args = parser.parse_args()
    folder = ROOT / "build" / "fuzz-coverage"
    compiler = ("-DCMAKE_CXX_COMPILER=clang++-14", "-DCMAKE_C_COMPILER=clang-14", "-DCMAKE_BUILD_TYPE=Debug")
    flags = (f"-DCMAKE_CXX_FLAGS={COVERAGE}", "-DCMAKE_CXX_FLAGS_DEBUG=-O1", f"-DCMAKE_EXE_LINKER_FLAGS={COVERAGE}")
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DNVX_PYTHON=OFF", "-DNVX_FUZZ=ON", *compiler, *flags)
    targets = sorted(path.stem for path in (ROOT / "tests" / "fuzz").glob("*_fuzz.cc"))
    run("cmake", "--build", folder, "--target", *targets)
    profiles, programs = [], [folder / target for target in targets]
    for program in programs:
        seeds = SEEDS / program.name
        seeds.mkdir(parents=True, exist_ok=True)
        if args.grow:
            grow(program, seeds, args.grow)
        profiles.append(folder / f"{program.name}.profraw")
        run(program, "-runs=0", seeds, LLVM_PROFILE_FILE=str(profiles[-1]))
    run(tool("llvm-profdata"), "merge", "-o", folder / "all.profdata", *profiles)
    objects = [word for program in programs[1:] for word in ("-object", program)]
    export = (tool("llvm-cov"), "export", "-summary-only", "-format=lcov", f"-instr-profile={folder}/all.profdata")
    report = run(*export, programs[0], *objects)
    reached = total = 0
    unseen = set(DECODERS)
    for record in report.split("end_of_record"):
        name, lines, hit = (re.search(rf"^{key}:(.+)$", record, re.M) for key in ("SF", "LF", "LH"))
        if not name or name[1].split("/csrc/")[-1] not in DECODERS:
            continue
        unseen.discard(name[1].split("/csrc/")[-1])
        reached, total = reached + int(hit[1]), total + int(lines[1])
        print(f"{int(hit[1]) / int(lines[1]):6.1%} of {int(lines[1]):4} lines  {name[1].split('/csrc/')[1]}")
    if unseen:
        sys.exit(f"coverage.py: no target has {', '.join(sorted(unseen))}")
    print(f"{reached / total:6.1%} of {total:4} lines")


if __name__ == "__main__":
    main()
