"""`python bench/targets.py`: measures the figures of all speed goals and prints one verdict a goal."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import goals
from nvx.bench import machine, world
from nvx.bench.contenders import known
from results_file import read

DEFAULT_FILE = Path(__file__).with_name("results") / "targets.json"
BENCH = str(Path(__file__).with_name("run.py"))
_SIZES_2 = "8,4K,64K,1M,16M,64M"
_SIZES_4 = "8,4K,64K,1M,16M"
_SIZES_FAR = "8,1K,64K,1M,16M"
_REST = "reduce broadcast all_gather reduce_scatter all_to_all gather scatter sendrecv barrier"
PARTS: dict[str, str] = {
    "all_reduce": f"all_reduce -n 2 --sizes {_SIZES_2} --primary --vs gloo,null,deepspeed,mpi",
    "others": f"{_REST} -n 2 --sizes {_SIZES_2} --primary --vs gloo,null",
    "four": f"all_reduce all_gather reduce_scatter barrier -n 4 --sizes {_SIZES_4} --primary --vs gloo",
    "far": f"all_reduce -n 2 --hosts 2 --sizes {_SIZES_FAR} --primary --vs gloo,null,socket",
    "far_others": f"all_gather reduce_scatter broadcast all_to_all sendrecv -n 2 --hosts 2 --sizes {_SIZES_FAR} "
    "--primary --vs gloo",
    "far_four": f"all_reduce -n 4 --hosts 2 --sizes {_SIZES_FAR} --primary --vs gloo",
    "train": "train -n 2 --vs gloo",
    "init": "init -n 2 --samples 15 --vs gloo",
    "overlap": "overlap -n 2 --vs gloo",
    "memory": "memory -n 2 --vs gloo",
}
_QUICK = {
    **dict.fromkeys(("all_reduce", "others", "four", "far", "far_others", "far_four"), "--blocks 2 --block-ms 4"),
    "train": "--iters 2 --blocks 1",
    "init": "--samples 1",
    "overlap": "--iters 3 --blocks 1",
    "memory": "--groups 4 --idle 0.3",
}


def read_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/targets.py", description=__doc__)
    parser.add_argument("--backend", default="nvx", help="the backend under test (default nvx)")
    parser.add_argument("-J", "--json", metavar="FILE", help="(default, without options: bench/results/targets.json)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: to see that it works, not how fast"
    )
    parser.add_argument("--judge", metavar="FILE", help="print the verdicts of a file of before instead of measuring")
    arguments = parser.parse_args(given)
    arguments.parts = arguments.parts.split(",")
    if not given:
        arguments.json = str(DEFAULT_FILE)
    if arguments.json:
        try:
            machine.check_writable(arguments.json)
        except OSError as error:
            parser.error(f"-J {arguments.json}: {error.strerror}")
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"no part '{unknown[0]}': there are {', '.join(PARTS)}")
    if arguments.backend not in known():
        parser.error(f"torch knows no backend '{arguments.backend}'")
    return arguments


def measured(part: str, backend: str, quick: bool) -> dict[str, Any] | None:
    """The results of one part; None if it failed, which the part has printed."""
    with tempfile.TemporaryDirectory(prefix="nvx-bench-") as folder:
        line = [*PARTS[part].split(), *(_QUICK[part].split() if quick else ()), "--backend", backend]
        if part == "all_reduce" and not _has_mpi():
            line[line.index("--vs") + 1] = line[line.index("--vs") + 1].removesuffix(",mpi")
        print(f"\n# --- bench/run.py {shlex.join(line)}", flush=True)
        into = os.path.join(folder, "part.json")
        environment = world.rank_environment(0, 1, 0)
        for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT".split():
            environment.pop(name)
        done = subprocess.run([sys.executable, BENCH, *line, "-J", into], env=environment, check=False)
        document = read(into) if os.path.exists(into) else None
        if document is not None:
            document["command"] = shlex.join(["bench/run.py", *line])
            document["status"] = done.returncode
        return document


def _has_mpi() -> bool:
    import importlib.util
    import shutil

    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def judged(parts: dict[str, Any], subject: str) -> list[goals.Verdict]:
    """Judges every goal that the measured parts cover; goals of parts that did not run are left out."""
    verdicts: list[goals.Verdict] = []
    for names, table in (
        (("all_reduce", "others", "four"), goals.COLLECTIVE_GOALS),
        (("far", "far_others", "far_four"), goals.HOST_GOALS),
    ):
        sweeps = [part for part in names if part in parts]
        results = [result for part in sweeps for result in parts[part]["results"]]
        verdicts += [
            verdict for verdict in goals.judge_collectives(results, subject, table)
            if len(sweeps) == len(names) or verdict.measured is not None
        ]  # fmt: skip
    for part, judge in (
        ("train", goals.judge_steps),
        ("init", goals.judge_init),
        ("overlap", goals.judge_overlap),
    ):
        if part in parts:
            verdicts += judge(parts[part]["results"], subject)
    if "memory" in parts:
        memory = parts["memory"]
        verdicts += goals.judge_memory(memory["results"], memory["arguments"]["idle_s"], subject)
    return verdicts


def show(document: dict[str, Any], verdicts: list[goals.Verdict]) -> int:
    """Prints the table; returns 1 if a goal was missed and the run was not quick, or if a result was wrong."""
    rounds = [value for part in document["parts"].values() for value in part.get("flag_round_us") or () if value]
    span = f"{min(rounds):.3f} to {max(rounds):.3f} us" if rounds else "not measured"
    print(f"\n# {document['command']}, {document['when']}")
    print(f"# {document['machine']['cpu']}, {document['machine']['cores']} cores; flag round {span}")
    print(goals.HEADER)
    for verdict in verdicts:
        print(verdict.line())
    tally = {word: sum(verdict.ok is word for verdict in verdicts) for word in (True, False, None)}
    wrong = sum(
        result.get("wrong") or 0 for part in document["parts"].values() for result in part["results"]
        if result["backend"] == document["subject"]
    )  # fmt: skip
    quick = document["arguments"].get("quick", False)
    if quick:
        print("# quick: this shows that everything runs; the times are no measure, and nothing is judged by them")
    print(f"# {tally[True]} ok, {tally[False]} short, {tally[None]} not judged; wrong elements: {wrong}")
    return 1 if (tally[False] and not quick) or wrong else 0


def main(given: list[str]) -> int:
    """Measures, judges, prints, and writes one file."""
    arguments = read_arguments(given)
    if arguments.judge:
        document = read(arguments.judge)
        return show(document, judged(document["parts"], document["subject"]))
    names = arguments.parts
    parts = {name: measured(name, arguments.backend, arguments.quick) for name in names}
    failed = [name for name, part in parts.items() if part is None]
    document = machine.document(
        "targets", shlex.join(["bench/targets.py", *given]), {"parts": names, "quick": arguments.quick},
        subject=arguments.backend, parts={name: part for name, part in parts.items() if part is not None},
        failed=failed,
    )  # fmt: skip
    verdicts = judged(document["parts"], arguments.backend)
    document["verdicts"] = [verdict.as_json() for verdict in verdicts]
    if arguments.json:
        machine.write(arguments.json, document)
    status = show(document, verdicts)
    for name in failed:
        print(f"# {name}: failed, no figures")
    print(f"# written: {arguments.json or 'no file'}")
    return 1 if failed else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
