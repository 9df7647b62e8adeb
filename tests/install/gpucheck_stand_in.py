#!/usr/bin/env python3
"""Plays nvx_gpucheck for tests: NVX_STAND_IN says how each part goes, as JSON; parts that it does not name pass."""

import json
import os
import signal
import subprocess
import sys
import time

part = sys.argv[1] if sys.argv[1] != "--tool" else sys.argv[2]
how = json.loads(os.environ.get("NVX_STAND_IN", "{}")).get(part, "pass")


def say(**fields):
    print(json.dumps({"part": part, **fields}), flush=True)


with open(os.environ["NVX_STAND_IN_LOG"], "a") as log:
    log.write(f"{part} {' '.join(sys.argv[2:])}\n")
say(figure=1.5)
if how == "pass":
    say(end="passed", tried=3, failed=0)
elif how == "fail":
    say(failed="all_reduce f32", why="wrong output")
    say(end="failed", tried=3, failed=1)
    sys.exit(1)
elif how == "hang":
    child = subprocess.Popen(["sleep", "600"])
    say(child=child.pid)
    with open(os.environ["NVX_STAND_IN_LOG"] + ".child", "w") as file:
        file.write(f"{child.pid}\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
elif how == "wait":
    with open(os.environ["NVX_STAND_IN_LOG"] + ".child", "w") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)
elif how == "odd":  # figures that nobody can make sense of
    say(start=1)
    say(bench="all_reduce", algorithm="one_shot", ranks=8)
    say(copy="device_to_device", bytes=1 << 28, gb_s=None)
    print("[" * 100_000, flush=True)
    print('{"deep": ' + "[" * 300 + "]" * 300 + "}", flush=True)
    say(end="passed", tried=3, failed=0)
elif how == "realtime":
    os.kill(os.getpid(), signal.SIGRTMIN + 1)
elif how == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "garbage":
    sys.stdout.buffer.write(b"\xff\xfe{not json\n[1, 2]\n" + b"x" * 100_000 + b"\n")
    print("a last word")
elif how == "liar":  # says that it passed, and ends badly
    say(end="passed", tried=3, failed=0)
    sys.exit(3)
elif how == "skip":
    say(end="skipped", why="no such thing here")
elif how == "sanitizer":
    found = {"racecheck": "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"}
    print("=========", found.get(part, "ERROR SUMMARY: 4 errors"))
    say(end="passed", tried=3, failed=0)
    sys.exit(9)
