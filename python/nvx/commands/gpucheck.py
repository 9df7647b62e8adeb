"""`nvx gpucheck`: tries nvx on the GPUs of this machine, measures it beside others, and writes one file.

It builds a program and torch modules from nvx's sources, which needs a checkout and nvcc but no network, and runs its
parts one after the other, each in a process of its own with a limit. The file is written after every part: whatever
happens, what was found until then is there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..gpucheck import build, join, judge, parts, probe, run, table

NO_GPU = "no GPU"
BUILDS = 240.0  # seconds, at most


class Check:
    """A run, and the file that it becomes."""

    def __init__(self, options: argparse.Namespace, gpus: list[dict[str, Any]]) -> None:
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
        results = self.source / "bench" / "results" if self.source and gpus else Path.cwd()
        self.file = Path(options.json or results / "gpucheck.json")
        self.document = head(options)
        self.document["parts"] = {name: run.Outcome("skipped", "not reached").as_json() for name in options.parts}
        self.document["targets"] = []
        self.document["gpus"] = gpus

    def write(self) -> None:
        from ..bench import machine

        self.document["minutes"] = round((time.monotonic() - self.began) / 60, 2)
        self.document["targets"] = [verdict.as_json() for verdict in judge.judge(self.document)]
        machine.write(str(self.file), self.document)

    def record(self, name: str, outcome: run.Outcome) -> None:
        self.document["parts"][name] = outcome.as_json()
        self.write()
        end = next((line for line in reversed(outcome.lines) if "end" in line), {})
        tried = f", {end['tried']} tried" if end.get("tried") else ""
        why = f": {outcome.why}" if outcome.why else ""
        print(f"  {name:16}{outcome.state:12}{outcome.seconds:6.1f} s{tried}{why}", flush=True)

    def skip_rest(self, why: str) -> None:
        for part in self.document["parts"].values():
            if part["why"] == "not reached":
                part["why"] = why
        self.write()

    def states(self) -> list[str]:
        return [part["state"] for part in self.document["parts"].values()]

    def build(self, computes: list[str]) -> build.Built:
        """What the parts run, built if that is wanted. Raises BuildError."""
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
            print(f"  --no-build, but nothing is built in {folder} yet", flush=True)
        print(f"  building for {', '.join(computes)} in {folder}", flush=True)
        began = time.monotonic()
        result = build.build(self.source, folder, computes, min(BUILDS, self.end - began))
        self.document["build"] = {"seconds": round(time.monotonic() - began, 1), "for": computes}
        if result.missing:
            self.document["build"]["missing"] = result.missing
        for what, why in result.missing.items():
            print(f"  {what} is not there: {why}", flush=True)
        print(f"  built in {time.monotonic() - began:.0f} s", flush=True)
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
            mps, no_mps = {}, ""
            if part.together:
                whole = end - time.monotonic()
                mps, no_mps = stack.enter_context(parts.mps(whole))
                self.document["mps"] = no_mps or "used where processes share a GPU"
                if mps:  # which has yet to end
                    end -= min(parts.MPS_ENDS, whole / 3)
            seconds = max(1.0, end - time.monotonic())
            outcome = run.run(parts.command(part, scene, seconds, bool(mps)), seconds, environment | mps)
            outcome.mps = bool(mps)
        if outcome.state == "skipped" and no_mps:
            outcome.why += f" ({no_mps})"
        return outcome

    def run_all(self, scene: parts.Scene) -> None:
        """Each part in turn. KeyboardInterrupt where one was interrupted."""
        for name in self.options.parts:
            part = parts.PARTS[parts.NAMES.index(name)]
            print(f"  {name:16}{part.asks} ...", end="\r" if sys.stdout.isatty() else "\n", flush=True)
            outcome = self.run_part(part, scene)
            self.record(name, outcome)
            if outcome.state == "interrupted":
                raise KeyboardInterrupt


def head(options: argparse.Namespace) -> dict[str, Any]:
    """What every results file begins with; without torch's version where there is no torch."""
    from ..bench import machine

    command = shlex.join(["nvx", "gpucheck", *options.given])
    arguments = {"minutes": options.minutes, "parts": options.parts, "kind": options.kind}
    try:
        document = machine.document("gpucheck", command, arguments)
    except ImportError as error:
        now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        versions = {"python": platform.python_version(), "torch": f"none ({error})"}
        document = {"schema": machine.SCHEMA, "what": "gpucheck", "command": command, "when": now.isoformat()}
        document |= {"machine": machine.describe(), "versions": versions, "arguments": arguments}
    return document | {"driver": probe.driver_version(), "sanitizer": parts.sanitizer() or "not installed"}


def conclude(check: Check) -> None:
    """What passed, what failed, what was skipped and why; and the targets."""
    found = check.document["parts"]
    by_state: dict[str, list[str]] = {}
    for name, part in found.items():
        by_state.setdefault(part["state"], []).append(name)
    print()
    for state, names in by_state.items():
        print(f"{state}: {', '.join(names)}")
    for name, part in found.items():
        if part["state"] == "skipped":
            print(f"  {name} was skipped: {part['why']}")
        elif part["state"] != "passed" or part["why"]:
            print(f"  {name} {part['state']}: {part['why']}")
    for target in check.document["targets"]:
        measured = f": {target['measured']}" if target["measured"] else ""
        print(f"target {target['state']}: {target['target']}{measured}")
    print(f"written: {check.file}")


def check_machine(options: argparse.Namespace) -> int:
    found, why = probe.gpus()
    check = Check(options, found)
    if not found:
        check.skip_rest(NO_GPU)
        print(f"nvx gpucheck: there is no GPU here: {why}. Nothing was run.")
        print(f"written: {check.file}")
        return 2
    check.write()
    print(f"nvx gpucheck: {', '.join(gpu['name'] for gpu in found)}; at most {options.minutes:g} minutes")
    if parts.sanitizer() is None:
        print("  compute-sanitizer is not installed: its parts are left out")
    try:
        if check.no_source:
            raise build.BuildError(check.no_source)
        scene = check.scene(check.build(sorted({gpu["compute"] for gpu in found})), len(found))
    except (build.BuildError, OSError, subprocess.SubprocessError) as error:
        check.document["build"] = {"failed": str(error)}
        check.skip_rest("nothing was built")
        print(f"nvx gpucheck: {error}", file=sys.stderr)
        return 2 if check.no_source else 1
    except KeyboardInterrupt:
        check.skip_rest("interrupted")
        return 130
    try:
        check.run_all(scene)
    except KeyboardInterrupt:
        check.skip_rest("interrupted")
        conclude(check)
        return 130
    check.write()
    conclude(check)
    return 0 if set(check.states()) <= {"passed", "skipped"} else 1


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
        options.parts = parts.expand([name for name in options.parts.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    return options


def show(options: argparse.Namespace) -> int:
    """The tables of earlier files, as one where they are several."""
    from ..bench import machine

    try:
        documents = [machine.read(file) for file in options.table]
        for file, document in zip(options.table, documents, strict=True):
            if document.get("what") != "gpucheck":
                raise ValueError(f"{file} was written by nvx {document.get('what')}")
        whole = documents[0] if len(documents) == 1 else join.join(documents)
    except (OSError, ValueError) as error:
        print(f"nvx gpucheck: {error}", file=sys.stderr)
        return 2
    if options.json:
        machine.write(options.json, whole)
    print(table.markdown(whole))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = read_arguments(list(sys.argv[1:] if arguments is None else arguments))
    if options.table:
        return show(options)
    return check_machine(options)
