"""Runs of `nvx gpucheck` on an imagined GPU, with a stand-in for its program."""

import json
import os
import pathlib
import subprocess
import sys
import time

from nvx.commands import gpucheck
from nvx.gpucheck import mps, parts, probe, processes

STAND_IN = pathlib.Path(__file__).with_name("gpucheck_stand_in.py")
PROGRAM_PARTS = [part.name for part in parts.PARTS if part.kind == "program" and part.gpus == 1]
ONE_GPU = [{"name": "Imagined", "compute": "9.0"}]


def states(document):
    return {name: part["state"] for name, part in document["parts"].items()}


def eventually(happens, seconds=60):
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


def gone(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def script(file, text):
    """An executable of the shell's."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


class Here:
    """Runs the command in this process: its exit code, its file, and the parts that were run."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.log = monkeypatch, folder / "log"
        self.file = folder / "results" / "found.json"
        monkeypatch.setattr(probe, "ask", lambda seconds=30: probe.Answer(ONE_GPU))
        monkeypatch.setattr(parts, "sanitizer", lambda: None)
        monkeypatch.setattr(mps, "PLACES", ())
        monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin")
        monkeypatch.setenv("NVX_STAND_IN_LOG", str(self.log))

    def __call__(self, how=None, names=PROGRAM_PARTS, minutes=9, limit=None):
        self.monkeypatch.setenv("NVX_STAND_IN", json.dumps(how or {}))
        if limit is not None:
            short = [part.__class__(**{**part.__dict__, "seconds": limit}) for part in parts.PARTS]
            self.monkeypatch.setattr(parts, "PARTS", tuple(short))
        given = [
            "-J",
            str(self.file),
            "--program",
            str(STAND_IN),
            "--parts",
            ",".join(names),
            "--minutes",
            str(minutes),
        ]
        code = gpucheck.main(given)
        ran = [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return code, json.loads(self.file.read_text()), ran


class Apart:
    """The same in a process of its own, which can be sent signals. before: code that is run first."""

    def __init__(self, folder, how, names, before="", **environment):
        self.file, self.log, self.child = folder / "found.json", folder / "log", folder / "log.child"
        given = ["-J", str(self.file), "--program", str(STAND_IN), "--parts", ",".join(names)]
        code = (
            "import signal, sys, time\nfrom nvx import cli\nfrom nvx.gpucheck import probe, versions\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin without it
            f"answers, probe.ask = probe.ask, lambda seconds: probe.Answer({ONE_GPU!r})\n"
            f"versions.found = lambda source: {{}}\n{before}\n"  # which imports torch
            f"sys.exit(cli.main(['gpucheck', *{given!r}]))"
        )
        surroundings = {"NVX_STAND_IN": json.dumps(how), "NVX_STAND_IN_LOG": str(self.log)} | environment
        self.process = processes.start(
            [sys.executable, "-c", code],
            env=os.environ | surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hung(self):
        """The number of what the part that hangs has started, once it has."""
        assert eventually(lambda: self.child.exists() and self.child.read_text().endswith("\n"))
        return int(self.child.read_text())

    def ended(self, number=None):
        """Its exit status, its file, and what it said."""
        if number is not None:
            self.process.send_signal(number)
        told = "".join(self.process.communicate(timeout=120))
        assert "Traceback" not in told, told
        return self.process.returncode, json.loads(self.file.read_text()), told
