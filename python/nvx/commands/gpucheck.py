"""`nvx gpucheck`: tries nvx on the GPUs of this machine, measures it beside others, and writes one file.

It builds a program and torch modules from nvx's sources, which needs a checkout and nvcc but no network, and runs its
parts one after the other, each in a process of its own with a limit. The file is written after every part: whatever
happens, what was found until then is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .. import interrupts
from ..gpucheck import build, join, judge, mps, parts, probe, results, run, table, versions
from ..gpucheck.screen import say, warn

BUILDS = 240.0  # seconds, at most


class Check:
    """A run, and the file that it becomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.end = self.began + options.minutes * 60
        try:
            self.source: Path | None = build.find_source(options.source)
            self.no_source = ""
        except build.BuildError as error:
            self.source, self.no_source = None, str(error)
        if options.program:
            self.no_source = ""
        # What a machine with a GPU has found is not replaced by what one without has not.
        self.file = results.File(Path(options.json or "gpucheck.json"))
        self.document = head(options)
        self.document["parts"] = {name: run.Outcome("skipped", "not reached").as_json() for name in options.parts}
        self.document["targets"] = []
        self.document["gpus"] = []

    def write(self) -> None:
        self.document["minutes"] = round((time.monotonic() - self.began) / 60, 2)
        self.document["targets"] = [verdict.as_json() for verdict in judge.judge(self.document)]
        self.file.write(self.document)

    def record(self, name: str, outcome: run.Outcome) -> None:
        self.document["parts"][name] = outcome.as_json()
        self.write()
        end = next((line for line in reversed(outcome.lines) if "end" in line), {})
        tried = f", {end['tried']} tried" if end.get("tried") else ""
        why = f": {outcome.why}" if outcome.why else ""
        say(f"  {name:16}{outcome.state:12}{outcome.seconds:6.1f} s{tried}{why}")

    def skip_rest(self, why: str) -> None:
        for part in self.document["parts"].values():
            if part["why"] == "not reached":
                part["why"] = why
        self.write()

    def states(self) -> list[str]:
        return [part["state"] for part in self.document["parts"].values()]

    def look(self) -> probe.Answer:
        """What there is to run on, with which versions; the file is where it is to be."""
        answer = probe.ask(max(1.0, min(probe.SECONDS, self.end - time.monotonic())))
        self.document["gpus"] = answer.gpus
        if answer.gpus and self.source and not self.options.json:
            self.file = results.File(self.source / "bench" / "results" / "gpucheck.json")
        self.document["versions"] = versions.found(self.source)
        return answer

    def build(self, computes: list[str]) -> build.Built:
        """What the parts run, built if that is wanted; of what is not there, why."""
        if self.options.program:
            return build.Built({"program": self.options.program}, {})
        assert self.source is not None
        folder = Path(self.options.build_dir or self.source / "build" / "gpucheck")
        if self.options.no_build:
            found = build.Built()
            for what in build.TARGETS:
                found.add(what, folder)
            if found.found:
                return found
            say(f"  --no-build, but nothing is built in {folder} yet")
        say(f"  building for {', '.join(computes)} in {folder}")
        began = time.monotonic()
        self.document["build"] = told = {"for": computes}
        try:
            result = build.build(self.source, folder, computes, min(BUILDS, self.end - began))
        except KeyboardInterrupt as error:
            told["failed"] = f"interrupted: {error}"
            raise
        except (OSError, subprocess.SubprocessError) as error:
            result = build.Built({}, dict.fromkeys(build.TARGETS, str(error)))
        told["seconds"] = round(time.monotonic() - began, 1)
        if result.missing:
            told["missing"] = result.missing
        for what, why in result.missing.items():
            say(f"  {what} is not there: {why}")
        if not result.found:
            told["failed"] = next(iter(result.missing.values()))
            warn(f"nothing was built: {told['failed']}. The parts that need nothing of it are run")
        else:
            say(f"  built in {told['seconds']:.0f} s")
        return result

    def scene(self, built: build.Built, gpus: int) -> parts.Scene:
        source = str(self.source or "")
        return parts.Scene(built.found, built.missing, gpus, source, self.options.kind, parts.DEVICE)

    def run_part(self, part: parts.Part, scene: parts.Scene) -> run.Outcome:
        end = min(self.end, time.monotonic() + part.seconds)
        if end - time.monotonic() < 5:
            return run.Outcome("skipped", "time ran out")
        try:
            parts.check_needs(part, scene)
        except parts.Unavailable as error:
            return run.Outcome("skipped", str(error))
        except parts.Missing as error:
            return run.Outcome("failed", str(error))
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": path}
        with contextlib.ExitStack() as stack:
            place, no_mps = {}, ""
            if part.together:
                whole = end - time.monotonic()
                place, no_mps = stack.enter_context(mps.running(whole))
                self.document["mps"] = no_mps or "used where processes share a GPU"
                if place:  # which has yet to end
                    end -= min(mps.ENDS, whole / 3)
            seconds = max(1.0, end - time.monotonic())
            outcome = run.run(parts.command(part, scene, seconds, bool(place)), seconds, environment | place)
            outcome.mps = bool(place)
        if outcome.state == "skipped" and no_mps:
            outcome.why += f" ({no_mps})"
        return outcome

    def try_part(self, part: parts.Part, scene: parts.Scene) -> run.Outcome:
        """However it goes."""
        try:
            return self.run_part(part, scene)
        except KeyboardInterrupt as error:
            return run.Outcome("interrupted", str(error))
        except OSError as error:
            return run.Outcome("failed", f"it could not be run: {error}")

    def run_all(self, scene: parts.Scene, heard: interrupts.Heard) -> None:
        """Each part in turn. KeyboardInterrupt where one was interrupted."""
        for name in self.options.parts:
            heard.look()
            part = parts.PARTS[parts.NAMES.index(name)]
            say(f"  {name:16}{part.asks} ...", end="\r" if sys.stdout.isatty() else "\n")
            outcome = self.try_part(part, scene)
            self.record(name, outcome)
            if outcome.state == "interrupted":
                raise KeyboardInterrupt(outcome.why)

    def go(self, heard: interrupts.Heard) -> int:
        """The exit status. KeyboardInterrupt where it was interrupted."""
        answer = self.look()
        heard.look()
        if not answer.gpus:
            self.document["no_gpu"] = answer.as_json()
            self.skip_rest(answer.in_short())
            none = "there is no GPU here" if answer.kind == "no GPU" else "no GPU can be used"
            say(f"nvx gpucheck: {none}: {answer.why}. Nothing was run.")
            say(self.file.told())
            return 2
        self.write()
        say(f"nvx gpucheck: {', '.join(gpu['name'] for gpu in answer.gpus)}; at most {self.options.minutes:g} minutes")
        if parts.sanitizer() is None:
            say("  compute-sanitizer is not installed: its parts are left out")
        if self.no_source:
            self.document["build"] = {"failed": self.no_source}
            self.skip_rest("nothing was built")
            warn(self.no_source)
            say(self.file.told())
            return 2
        built = self.build(sorted({gpu["compute"] for gpu in answer.gpus}))
        self.run_all(self.scene(built, len(answer.gpus)), heard)
        self.write()
        conclude(self)
        return 0 if set(self.states()) <= {"passed", "skipped"} else 1


def head(options: argparse.Namespace) -> dict[str, Any]:
    """What is known at once of what every results file begins with."""
    from ..bench import machine

    command = shlex.join(["nvx", "gpucheck", *options.given])
    arguments = {"minutes": options.minutes, "parts": options.parts, "kind": options.kind}
    document = machine.head("gpucheck", command, arguments)
    return document | {"driver": probe.driver_version(), "sanitizer": parts.sanitizer() or "not installed"}


def conclude(check: Check) -> None:
    """What passed, what failed, what was skipped and why; and the targets."""
    found = check.document["parts"]
    by_state: dict[str, list[str]] = {}
    for name, part in found.items():
        by_state.setdefault(part["state"], []).append(name)
    say()
    for state, names in by_state.items():
        say(f"{state}: {', '.join(names)}")
    for name, part in found.items():
        if part["state"] == "skipped":
            say(f"  {name} was skipped: {part['why']}")
        elif part["state"] != "passed" or part["why"]:
            say(f"  {name} {part['state']}: {part['why']}")
    for target in check.document["targets"]:
        measured = f": {target['measured']}" if target["measured"] else ""
        say(f"target {target['state']}: {target['target']}{measured}")
    say(check.file.told())


def check_machine(options: argparse.Namespace) -> int:
    with interrupts.heeded() as heard:
        try:
            with interrupts.put_off():
                check = Check(options)
            status = check.go(heard)
            heard.look()
            return status
        except KeyboardInterrupt as error:
            check.document["interrupted"] = str(error)
            check.skip_rest("interrupted")
            conclude(check)
            return heard.status


def read_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nvx gpucheck", description="Tries nvx on the GPUs of this machine, measures it, and writes one file."
    )
    names = ",".join((*parts.NAMES, *parts.GROUPS))
    default = "bench/results/gpucheck.json in the sources"
    parser.add_argument("-J", dest="json", metavar="FILE", help=f"the file (default: {default})")
    parser.add_argument("--minutes", type=float, default=9, help="for all of it, the build too (default: 9)")
    parser.add_argument("--parts", default=",".join(parts.NAMES), help=f"some of {names}")
    parser.add_argument("--source", metavar="DIR", help="nvx's sources (default: where this package lies, or here)")
    parser.add_argument("--build-dir", metavar="DIR", help="where to build (default: build/gpucheck in the sources)")
    parser.add_argument(
        "--no-build", action="store_true", help="use what was built before, and build only where nothing was"
    )
    parser.add_argument("--program", metavar="FILE", help="use this program")
    parser.add_argument(
        "--kind", choices=parts.KINDS, default="", help="of memory that processes share (default: the best there is)"
    )
    parser.add_argument(
        "--table",
        metavar="FILE",
        nargs="+",
        help="print the tables of earlier files, judged together, and run nothing; with -J write them as one",
    )
    options = parser.parse_args(given)
    options.given = given
    try:
        options.parts = parts.expand([name for word in options.parts.split(",") if (name := word.strip())])
        if not options.parts:
            raise ValueError("--parts names none")
    except ValueError as error:
        parser.error(str(error))
    if options.minutes <= 0:
        parser.error("--minutes: more than 0 are needed")
    for name, place in (("--source", options.source), ("--program", options.program)):
        if place and not Path(place).exists():
            parser.error(f"{name}: there is no {place}")
    return options


def show(options: argparse.Namespace) -> int:
    """The tables of earlier files, as one where they are several."""
    from ..bench import machine

    try:
        documents = [machine.read(file) for file in options.table]
        for file, document in zip(options.table, documents, strict=True):
            if document.get("what") != "gpucheck":
                raise ValueError(f"{file} holds results of '{document.get('what')}'; tables are made of gpucheck's")
        whole = documents[0] if len(documents) == 1 else join.join(documents)
        for doubt in whole.get("doubts", ()):
            warn(doubt)
    except (OSError, ValueError) as error:
        warn(str(error))
        return 2
    print(table.markdown(whole))
    if options.json:
        file = results.File(Path(options.json))
        file.write(whole)
        return 1 if file.why else 0
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = read_arguments(list(sys.argv[1:] if arguments is None else arguments))
    if options.table:
        return show(options)
    return check_machine(options)
