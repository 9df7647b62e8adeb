"""The figures of docs/reliability.md: `bench/reliability.py R1 R17` runs the commands of these rows, and writes their
figures to bench/results/reliability.json and to the page's table. `--list` prints the rows, `--page` writes the page.

The commands of a row with `{seed}` run `--worlds` worlds at a time, and go on where they stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvx.bench import machine
from results_file import read

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "reliability.md", ROOT / "bench" / "results" / "reliability.json"
BEGIN, END = "<!-- made by bench/reliability.py -->\n", "<!-- end of the figures -->\n"
Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """`aims`: comparisons of figures with numbers, which hold for each command whose figures have the name. A row
    without a command says in `why` for what reason."""

    name: str
    measured: str
    aims: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    why: str = ""


PASSED = ("failed = 0", "passed >= 1")
DRILLED = ("short = 0", "cells >= 1")
SOON = ("p99_s <= 0.2", "max_s <= 1", "unnamed = 0", "worlds >= 100")
KILLS = "python tests/torch/kills.py --limit 60 --ranks 8 --load 2 --worlds"  # on 2 cores: 4 ranks a core
NEMESIS = "python -m tests.nemesis --jobs 6 --seed {seed} --worlds {worlds}"
SAME = ("descriptors <= 0", "threads <= 0", "shared names <= 0")
TURNS = "NVX_TEST_TURNS=100 pytest tests/torch"
GPU = "needs a GPU: `scripts/gpu_evidence.py`"

ROWS = (
    Row("R1", "SIGKILL of a rank while the others wait in all_reduce; 4 ranks a core and load", SOON,
        (f"{KILLS} 200 --phase steady",)),
    Row("R2", "SIGKILL of a rank while kernels run", why=GPU),
    Row("R3", "SIGSEGV, `os._exit`, an exception in a collective", (*SOON[1:], *DRILLED),
        (f"{KILLS} 100 --phase steady --how SIGSEGV", f"{KILLS} 100 --phase steady --how exit",
         "nvx drill --fault raise")),
    Row("R4", "SIGKILL of a rank in its first and second `init_process_group`, and in `new_group`; a timeout of 2 s "
        "ends the wait for a rank that ended before it joined", (*SOON, "unseen <= 60", "max_unseen_s <= 3"),
        (f"{KILLS} 160 --timeout 2 --phase init", f"{KILLS} 160 --timeout 2 --phase again",
         f"{KILLS} 160 --phase new_group")),
    Row("R5", "SIGKILL of a rank of another host", ("max_s <= 2", "unnamed = 0", *PASSED),
        (f"{KILLS} 100 --phase steady --hosts 2", f"{KILLS} 100 --phase new_group --hosts 2",
         "pytest tests/hosts/test_hosts.py -k killed_rank_is_named")),
    Row("R6", "a host that falls silent, `NVX_LIVENESS_S=2`", DRILLED, ("nvx drill --fault link",)),
    Row("R7", "a link that is down for 3 s; loss, jitter and a slow link", PASSED,
        ("pytest tests/hosts/test_hosts.py -k 'link_that_is_down_for or loss_and_jitter or slow_link'",)),
    Row("R8", "another collective, or another order, on one rank", DRILLED, ("nvx drill --fault op order",)),
    Row("R9", "another size, type, root or operator on one rank", (*DRILLED, *PASSED),
        ("nvx drill --fault dtype size root", "pytest tests/torch/test_failures.py -k mismatch")),
    Row("R10", "groups that ranks use in opposite orders: the cycle is printed", PASSED,
        ("pytest tests/torch/test_cycles.py",)),
    Row("R11", "a rank that never calls is named at the timeout", DRILLED, ("nvx drill --fault absent",)),
    Row("R12", "SIGSTOP for 5 s, then SIGCONT: delay of the warning; the sum is right",
        ("warned = 1", "max_warning_s <= 2", *PASSED),
        (f"{TURNS}/test_figures.py -k stopped", "pytest tests/hosts/test_hosts.py -k stands_still_for_five")),
    Row("R13", "a rank that is 10 times slower", why="nvx raises no flag; `nvx status` shows which rank is waited for"),
    Row("R14", "error after timeouts of 1, 5 and 60 s, in the first call and the 1000th",
        ("max_beyond_1_s <= 0.2", "max_beyond_5_s <= 0.5", "max_beyond_60_s <= 6", *PASSED),
        (f"{TURNS}/test_figures.py -k timeouts", "pytest tests/torch/test_control.py -k timeout")),
    Row("R15", "abort from another thread while all ranks are stuck, in three groups", PASSED,
        ("pytest tests/torch/test_recovery.py -k abort", "pytest tests/torch/test_control.py -k abort")),
    Row("R16", "a rank is killed; the survivors and a new process make groups in the same processes",
        ("recoveries >= 100", "p50_s <= 0.3", *SAME, *PASSED), (f"{TURNS}/test_recovery.py -k survivors_recover",)),
    Row("R17", "1000 cycles of init and destroy: growth",
        ("lives >= 1000", *SAME, "mappings <= 0", "resident KiB <= 1024", *PASSED),
        (f"{TURNS}/test_recovery.py -k lives",)),
    Row("R18", "SIGKILL of whole jobs at random moments: no socket, process or name is left",
        ("killed jobs >= 200", *PASSED), (f"{TURNS}/test_recovery.py -k killed_jobs",)),
    Row("R19", "200 subgroups come and go, 64 of them alive: time of each with its first call, growth",
        ("subgroups >= 200", "p99_s <= 0.01", "resident KiB of each <= 1024", *SAME, *PASSED),
        (f"{TURNS}/test_figures.py -k subgroups",)),
    Row("R20", "a /dev/shm of one page, or read-only", PASSED, ("pytest tests/hosts/test_containers.py -k dev",)),
    Row("R21", "no ptrace, pidfd, memfd, /proc; few descriptors; other namespaces and users", PASSED,
        ("pytest tests/hosts/test_containers.py",)),
    Row("R22", "a pair of GPUs that corrupts or hangs, injected", PASSED,
        ("ctest --test-dir build/make/cpp -R 'Corrupts|CorruptPair|DeviceTrial[.]APair'",)),
    Row("R23", "bit flips in transit", why="nvx adds no checksum to TCP's and RDMA's"),
    Row("R24", "the same inputs 1000 times (100 times at 20,011 elements), each type and operator, "
        "all_reduce and reduce_scatter: calls whose bits differ",
        ("calls >= 100000", "ranks that differ = 0", *PASSED), (f"{TURNS}/test_figures.py -k same_bits",)),
    Row("R25", "exact sums: each type and operator at 299 sizes and 4 offsets, all_reduce and reduce_scatter",
        ("cells >= 100000", *PASSED), (f"{TURNS}/test_figures.py -k exact",)),
    Row("R26", "lines of the decoders that the committed fuzz seeds reach", ("percent >= 90",),
        ("python tests/fuzz/coverage.py",)),
    Row("R27", "unauthenticated clients, half-open connections and floods at the listeners during a run",
        ("connections >= 100000", "percent slower <= 1", *PASSED),
        ("PYTHONPATH=tests/support python -m tests.hosts.besieged 120", "pytest tests/hosts/test_strangers.py",
         "pytest tests/torch/test_flood.py")),
    Row("R28", "records of another version of nvx, damaged records", PASSED,
        ("ctest --test-dir build/make/cpp -R 'DamagedValues|GarbageIsNotBelieved'",)),
    Row("R29", "the core's tests under ThreadSanitizer, AddressSanitizer and UBSan", ("failed = 0",),
        ("python tests/gates/run tsan asan",)),
    Row("R30", "compute-sanitizer over the kernels", why=GPU),
    Row("R31", "fault injection: random jobs with faults (`tests/nemesis`)", ("failed = 0", "worlds >= 5000"),
        (NEMESIS, f"{NEMESIS} --hosts 2")),
    Row("R32", "soak: the same processes serve random jobs for hours, without wrong results, hangs, leaks",
        ("failed = 0", "hours >= 8"), (f"{NEMESIS} --timeout 6.5",)),
    Row("R33", "exit without destroy, in an exception, on Ctrl-C", ("max_exit_s <= 2", *PASSED),
        ("pytest tests/torch/test_process.py -k 'exit_without or exit_code or exception or interrupt'",)),
    Row("R34", "children of ranks: they hide no death, and touch no group", PASSED,
        ("pytest tests/torch/test_process.py -k child", "pytest tests/torch/test_failures.py -k child")),
    Row("R35", "cost of all changes since c3da7ecb, the commit before strangers were refused: an all_reduce "
        "of two ranks beside its build, percent",
        ("8 B on 1 host(s) <= 2", "8 B on 2 host(s) <= 2", "1 MiB on 1 host(s) <= 1", "1 MiB on 2 host(s) <= 1"),
        ("python bench/sides.py --before {before}",)),
    Row("R36", "errors that have rank, pid, host and advice; in calls also the own rank and the call's number. `met`: "
        "errors about ranks that had reached the set-up; of others nvx knows neither pid nor host",
        ("rank = errors", "advice = errors", "host >= met", "pid >= met", "own rank = in calls", "call = in calls"),
        ("nvx drill --fault kill exit raise op size memory descriptors link "
         "--phase init first steady async new_group",)),
    Row("R37", "after each kind of failure the process lives on", (*DRILLED, *PASSED),
        ("nvx drill --fault kill op size --phase first steady", "pytest tests/torch/test_failures.py -k lives_on")),
    Row("R38", "torch's analyzer names the rank with the fault from its flight recorder (torch 2.14 on)", PASSED,
        ("pytest tests/torch/test_flight_recorder.py",)),
)  # fmt: skip

# --- figures of a command --------------------------------------------------------------------------------------------


def of_junit(text: str) -> Figures:
    found = dict.fromkeys(("passed", "failed", "skipped"), 0.0)
    for case in xml.fromstring(text).iter("testcase"):
        ends = {child.tag for child in case}
        found["failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"] += 1
        for each in case.iter("property"):
            if each.attrib["name"] == "cmake_labels":
                continue
            name, value = each.attrib["name"], float(each.attrib["value"])
            found[name] = max(found.get(name, value), value)
    return found


def of_drill(text: str) -> Figures:
    rows = json.loads(text)["rows"]
    seconds = [row["seconds"] for row in rows if row["seconds"] and row["error"]]
    found = {"cells": len(rows), "short": sum(bool(row["short"]) for row in rows), "max_s": max(seconds, default=0)}
    errors = [row["error"] for row in rows if row["error"]]
    calls = [error for error in errors if re.search(r"\bin \w+(\(.*?\))? #\d+", error)]
    words = {"rank": r"\brank \d", "pid": r"\bpid \d", "host": r"\bhost \w", "advice": r"Next: \w"}
    found |= {name: sum(bool(re.search(word, error)) for error in errors) for name, word in words.items()}
    not_joined = sum(bool(re.search(r"\brank \d+ has not joined", error)) for error in errors)
    found |= {"errors": len(errors), "met": len(errors) - not_joined, "in calls": len(calls)}
    found["own rank"] = sum(bool(re.search(r"this is rank \d", error)) for error in calls)
    found["call"] = sum(bool(re.search(r"#\d+ of group \w", error)) for error in calls)
    return found


def of_kills(text: str) -> Figures:
    """`unseen`: worlds in which the rank ended before it joined, so that the timeout ended the others' wait."""
    sys.path.append(str(ROOT))
    from tests.torch.kills import SEEN, UNSEEN

    line = r"(\d+) worlds: p50 ([\d.]+) s, p99 ([\d.]+) s, max ([\d.]+) s; .* named in (\d+)"
    seen, unseen = (re.search(f"{name}: {line}", text) for name in (SEEN, UNSEEN))
    worlds, p50, p99, most, named = map(float, seen.groups()) if seen else (0.0,) * 5
    found = {"worlds": worlds, "p50_s": p50, "p99_s": p99, "max_s": most, "unnamed": worlds - named}
    if unseen:
        found |= {"unseen": float(unseen[1]), "max_unseen_s": float(unseen[4])}
        found["unnamed"] += float(unseen[1]) - float(unseen[5])
    return found


def of_nemesis(text: str) -> Figures:
    runs = re.findall(r"(\d+) worlds from seed .* in ([\d.]+) s: (\d+) failed", text)
    hours = sum(float(run[1]) for run in runs) / 3600
    return {"worlds": sum(int(run[0]) for run in runs), "failed": sum(int(run[2]) for run in runs), "hours": hours}


def of_besieged(text: str) -> Figures:
    """A rank whose call fails ends the program before it prints."""
    found = re.search(r"([\d,]+) connections, 0 errors in ([\d,]+) calls\n.*\((.+)%\)", text)
    if not found:
        return {"failed": 1}
    connections, calls, slower = (float(word.replace(",", "")) for word in found.groups())
    return {"connections": connections, "calls": calls, "failed": 0, "passed": 1, "percent slower": slower}


def of_sides(text: str) -> Figures:
    return {name: float(more) for name, more in re.findall(r"^(.+): ([+-][\d.]+) % in", text, re.M)}


def of_coverage(text: str) -> Figures:
    return {"percent": float(re.findall(r"([\d.]+)% of \d+ decoder lines", text)[0])}


# A word of the command: the option that names a file, and the reader of that file or of the output.
READERS: dict[str, tuple[str, Any]] = {
    "pytest": ("--junitxml", of_junit),
    "drill": ("-J", of_drill),
    "kills.py": ("", of_kills),
    "tests.nemesis": ("", of_nemesis),
    "ctest": ("--output-junit", of_junit),
    "coverage.py": ("", of_coverage),
    "sides.py": ("", of_sides),
    "tests.hosts.besieged": ("", of_besieged),
}
PROGRAMS = {"python": [], "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider"], "nvx": ["-m", "nvx"]}


def run(command: str) -> tuple[Figures, float]:
    """The figures of a command, and its seconds. Its output goes to the terminal too."""
    words, environment = shlex.split(command), dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        paths = [environment["PYTHONPATH"]] if name == "PYTHONPATH" and name in environment else []  # nvx may be there
        environment[name] = os.pathsep.join([value, *paths])
    key = next((key for key in READERS if any(word.rsplit("/")[-1] == key for word in words)), "")
    option, read = READERS.get(key, ("", None))
    program = [sys.executable, *PROGRAMS[words[0]]] if words[0] in PROGRAMS else words[:1]
    with tempfile.TemporaryDirectory(prefix="nvx-figures-") as folder:
        into, began = Path(folder) / "output", time.monotonic()
        line = [*program, *words[1:], *([option, str(into)] if option else ())]
        done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        if read is None:
            return {"failed": float(done.returncode != 0)}, time.monotonic() - began
        return read(into.read_text() if option else done.stdout), time.monotonic() - began


def recorded() -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """The document of the file, and its entries by row and command."""
    document = read(str(FILE)) if FILE.exists() else machine.document("reliability", "bench/reliability.py", {})
    return document, {(entry["row"], entry["command"]): entry for entry in document.get("rows", ())}


def measure(row: Row, command: str, before: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """The entry of a command. Counts of one that goes on where it stopped are added to those of `before`."""
    goes_on = "{seed}" in command
    counted = before["figures"] if before and goes_on else {}
    seed = 1 + int(counted.get("worlds", 0)) + (1_000_000 if row.name == "R32" else 0)
    print(f"# {row.name}: {command}", flush=True)
    figures, seconds = run(command.format(seed=seed, worlds=options.worlds, before=options.before))
    figures = {name: round(value + counted.get(name, 0), 4) for name, value in figures.items()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    head = machine.document("reliability", command, {})
    return {
        "row": row.name, "command": command, "figures": figures, "seconds": round(seconds, 1), "when": head["when"],
        "commit": commit.strip(), "cpu": head["machine"]["cpu"], "cores": head["machine"]["cores"],
        "torch": head["versions"]["torch"],
    }  # fmt: skip


# --- the table -------------------------------------------------------------------------------------------------------


def missed(row: Row, figures: Figures, entries: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """The aims that the figures do not reach, and, once all the row's commands have run, those without a figure."""
    out = []
    ran = [entries[row.name, one]["figures"] for one in row.commands if (row.name, one) in entries]
    all_ran = len(ran) == len(row.commands)
    for aim in row.aims:
        name, sign, bound = re.fullmatch(r"(.+) (<=|>=|=) (.+)", aim).groups()  # type: ignore[union-attr]
        limit = figures[bound] if bound in figures else float(bound) if bound[0].isdigit() else None
        if all_ran and not any(name in one for one in ran):
            out.append(f"{aim} (no figure)")
        elif name in figures and limit is not None:
            value = figures[name]
            if not {"<=": value <= limit, ">=": value >= limit, "=": value == limit}[sign]:
                out.append(aim)
    return out


def shown(row: Row, figures: Figures) -> str:
    """The figures of the aims, and quantiles."""
    named = {word for aim in row.aims for word in re.split(r" (?:<=|>=|=) ", aim)} | {"p50_s", "p99_s", "max_s"}
    parts = [f"{name.removesuffix('_s')} {value:g}{' s' if name.endswith('_s') else ''}"
             for name, value in figures.items() if name in named]  # fmt: skip
    return ", ".join(parts)


def table(document: dict[str, Any]) -> str:
    entries = {(entry["row"], entry["command"]): entry for entry in document["rows"]}
    letters = {place: chr(ord("A") + n) for n, place in enumerate(places(document))}
    lines = ["| row | measured | aim | command | figures | verdict | machine, commit |", "|" + "---|" * 7]
    for row in ROWS:
        aims = ", ".join(re.sub(r"_s (.*)", r" \1 s", aim) for aim in row.aims if not aim.endswith(" >= 1"))
        first = f"{row.name} | {row.measured} | {aims}"
        if row.why:
            lines.append(f"| {first} | | | {row.why} | |")
        for command in row.commands:
            entry, code = entries.get((row.name, command)), command.replace("|", "\\|")
            figures = entry["figures"] if entry else {}
            short = missed(row, figures, entries)
            skipped = figures.get("skipped") and not figures.get("passed")
            state = "not run" if not entry else "skipped here" if skipped else f"short of {', '.join(short)}"
            verdict = state if short or skipped or not entry else "reached"
            at = f"{letters[place_of(entry)]}, {entry['commit'][:7]}" if entry else ""
            lines.append(f"| {first} | `{code}` | {shown(row, figures)} | {verdict} | {at} |")
            first = " |  | "
    return "\n".join(lines) + "\n"


def place_of(entry: dict[str, Any]) -> str:
    return f"{entry['cores']} cores ({entry['cpu']}), torch {entry['torch']}"


def places(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(map(place_of, document["rows"])))


def summary(document: dict[str, Any]) -> str:
    named = (f"{chr(ord('A') + n)}: {place}" for n, place in enumerate(places(document)))
    return f"Machines: {'; '.join(named)}.\n"


def written(page: str, document: dict[str, Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + summary(document) + "\n" + table(document) + END + rest.partition(END)[2]


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/reliability.py", description=__doc__.partition("\n\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[[], *(row.name for row in ROWS)])
    parser.add_argument("--worlds", type=int, default=200, help="of a command that goes on where it stopped")
    parser.add_argument("--before", help="of R35: the folder with the other build's package")
    parser.add_argument("--list", action="store_true", help="print the rows and their commands")
    parser.add_argument("--page", action="store_true", help="write the page from the file")
    options = parser.parse_args(given)
    if "R35" in options.rows and not options.before:
        parser.error("R35 needs --before")
    current, failed = [(row, command) for row in ROWS for command in row.commands], 0
    for row, command in current:
        if options.list:
            print(f"{row.name}: {command}")
        if row.name in options.rows:
            key = (row.name, command)
            entry = measure(row, command, recorded()[1].get(key), options)
            document, entries = recorded()  # another run may have written meanwhile
            entries[key] = entry
            document["rows"] = [entries[row.name, one] for row, one in current if (row.name, one) in entries]
            machine.write(str(FILE), document)
            short = missed(row, entry["figures"], entries)
            failed += bool(short)
            print(f"# {row.name}: {shown(row, entry['figures'])}: {', '.join(short) or 'reached'}", flush=True)
    if options.rows or options.page:
        PAGE.write_text(written(PAGE.read_text(), recorded()[0]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
