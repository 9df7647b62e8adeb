"""How many decoder lines the committed seeds reach: tests/fuzz/coverage.py [--missed] [--grow SECONDS [TARGET ...]].

Builds the fuzz targets with clang's coverage, runs each over `tests/fuzz/seeds/TARGET`, and prints a line for each file
that decodes bytes of other processes. `--missed` adds the numbers of lines that are not reached. `--grow` first fuzzes
each target for that long, and keeps the smallest set of inputs that reaches all that was reached as its new seeds.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"
# Decoder lines are those of functions that run on bytes of another process: they parse or check them, or act on a value
# in them. The rule goes by function, so a file counts without those that only send or describe this process. Algorithms
# that read the counters in a peer's pad (kernel/cpu) have a target, channel_fuzz, and do not count as decoders.
WHOLE_BUT = {
    "base/failure_note.cc": "",
    "group/setup/topology.cc": """machine_seen host_hash on_different_machines quota_cores usable_cores cache_bytes
        read_line own_host_name describe_self encode encode_addresses""",
    "memory/gpu/pool_server.cc": "",
    "net/point_to_point.cc": """PointToPoint::announce PointToPoint::grant PointToPoint::send PointToPoint::push
        PointToPoint::next_done""",
    "net/segment_flow.cc": "SegmentFlow::take_credit",
    "net/tcp/tcp_incoming.cc": "",
    "net/tcp/tcp_wire.cc": "",
    "net/ucx/ucx_address.cc": "encode_address UcxVersion::text",
    "net/ucx/ucx_fetches.cc": "",
}
PARTS_OF = {
    "group/setup/inter_host_setup.cc": "InterHostSetUp::connect_to InterHostSetUp::connect",
    "group/setup/host_setup.cc": "HostSetUp::enter HostSetUp::reason",
    "group/p2p/mailbox.cc": """Mailbox::move Mailbox::advance Mailbox::read_port Mailbox::arrive
        Mailbox::match_unexpected Mailbox::accept Mailbox::release_idle MessagePeer::arrive MessagePeer::keep
        MessagePeer::release_kept MessagePeer::clear MessagePeer::finish""",
    "memory/gpu/mapping_setup.cc": "MappingSetup::receive_fd",
    "memory/gpu/local_server.cc": "LocalServer::serve LocalServer::accept LocalServer::handle",
    "memory/shm/arena.cc": "sealed_bytes Mapping::Mapping",
    "memory/shm/host_relay.cc": """receive_info read_all HostRelay::serve RelayClient::next
        RelayClient::take""",
    "memory/shm/shm_registry.cc": """receive_segment PeerProcess::PeerProcess PeerProcess::tensors ShmRegistry::find
        ShmRegistry::adopt IpcSocket::answer IpcSocket::serve IpcSocket::fetch IpcSocket::connect IpcSocket::receive""",
    "memory/shm/unix_socket.cc": """abstract_address tokens_in is_own peer_of same connect_to peer_pid accept_clients
        receive_packet""",
    "net/call_fingerprints.h": """CallFingerprints::note CallFingerprints::note_clash CallFingerprints::note_late
        CallFingerprints::has_ended""",
    "net/executor.cc": """ScheduleRun::flight_of ScheduleRun::refuse ScheduleRun::compare ScheduleRun::fits
        ScheduleRun::claim ScheduleRun::take ScheduleRun::end_fetch ScheduleRun::verdict_on ScheduleRun::store
        ScheduleRun::place ScheduleRun::dropped""",
    "net/group_port.cc": """GroupPort::arrived GroupPort::take_segment GroupPort::place GroupPort::dropped
        GroupPort::take_fingerprint GroupPort::send_fingerprint GroupPort::fail GroupPort::pinged_by
        GroupPort::send_other_failure GroupPort::note_departure""",
    "net/header.h": "read_header read_behind_header",
    "net/liveness.cc": """Liveness::note_sign_of_life Liveness::received Liveness::answer Liveness::take_answer
        Liveness::note_departure Liveness::settle""",
    "net/messenger.cc": "Messenger::connect Messenger::port_of Messenger::place Messenger::dropped Messenger::arrived",
    "net/tcp/job_key.cc": "JobKey::sign JobKey::same",
    "net/tcp/tcp.cc": """TcpLink::add TcpLink::accept TcpLink::bound_unauthenticated TcpLink::reap_incoming
        TcpLink::note_end TcpLink::handle""",
    "net/tcp/tcp_outgoing.cc": """Outgoing::fail Outgoing::advance Outgoing::receive_some Outgoing::send_proof
        Outgoing::receive_accepted Outgoing::check_for_end""",
    "net/ucx/ucx.cc": """UcxLink::add UcxLink::on_message UcxLink::on_control UcxLink::handle UcxLink::connect_back
        UcxLink::lose UcxLink::drop""",
}
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


def functions_of(export):
    """The functions of each file of csrc: name, first line, last line. Their lambdas are within these lines."""
    found = json.loads(export)["data"][0]["functions"]
    mangled = "\n".join(function["name"].split(":")[-1] for function in found)
    names = subprocess.run((tool("c++filt"), "-p"), input=mangled, capture_output=True, text=True, check=True).stdout
    table = {}
    for function, name in zip(found, names.splitlines(), strict=True):
        path = function["filenames"][0].split("/csrc/")[-1]
        short = re.sub(r"\(anonymous namespace\)::|\bnvx::|\bnet::|\[abi:cxx11\]|<.*>$", "", name)
        first, _, last = function["regions"][0][:3]
        table.setdefault(path, set()).add((short, first, last))
    return table


def decoder_lines(path, functions):
    """Stops if a name in the tables above is no function's: it was renamed or is gone."""
    names = set((WHOLE_BUT.get(path) or PARTS_OF.get(path) or "").split())
    if unknown := names - {name for name, _, _ in functions}:
        sys.exit(f"coverage.py: {path} has no function {', '.join(sorted(unknown))}")
    chosen = [
        f for f in functions if "lambda" not in f[0] and "$_" not in f[0] and (f[0] in names) != (path in WHOLE_BUT)
    ]
    return {line for _, first, last in chosen for line in range(first, last + 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missed", action="store_true", help="print the numbers of the lines that are not reached")
    parser.add_argument("--grow", type=int, metavar="SECONDS", default=0)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="the targets to grow seeds of (default: all)")
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
        if args.grow and (not args.targets or program.name in args.targets):
            grow(program, seeds, args.grow)
        profiles.append(folder / f"{program.name}.profraw")
        run(program, "-runs=0", seeds, LLVM_PROFILE_FILE=str(profiles[-1]))
    run(tool("llvm-profdata"), "merge", "-o", folder / "all.profdata", *profiles)
    objects = [word for program in programs[1:] for word in ("-object", program)]
    measured = ("export", f"-instr-profile={folder}/all.profdata", programs[0], *objects)
    paths = sorted({*WHOLE_BUT, *PARTS_OF})
    sources = [ROOT / "csrc" / path for path in paths]
    functions = functions_of(run(tool("llvm-cov"), *measured, *sources))
    reached = total = 0
    records = run(tool("llvm-cov"), *measured, "-format=lcov", *sources).split("end_of_record")
    counts = {
        r.split("/csrc/")[1].split("\n")[0]: re.findall(r"^DA:(\d+),(\d+)", r, re.M) for r in records if "/csrc/" in r
    }
    for path in paths:
        if path not in counts:
            sys.exit(f"coverage.py: no target has {path}")
        lines = decoder_lines(path, functions[path])
        runs = {int(line): int(count) for line, count in counts[path] if int(line) in lines}
        hit = sum(count != 0 for count in runs.values())
        reached, total = reached + hit, total + len(runs)
        print(f"{hit / len(runs):6.1%} of {len(runs):4} lines  {path}")
        if args.missed:
            print("        ", *(line for line, count in runs.items() if count == 0))
    print(f"{reached / total:6.1%} of {total:4} decoder lines, by {sum(1 for _ in SEEDS.glob('*/*'))} seeds")


if __name__ == "__main__":
    main()
