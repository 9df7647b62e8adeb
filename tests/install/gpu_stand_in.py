#!/usr/bin/env python3
"""Stands in for `nvx_gpu`: NVX_STAND_IN gives each part's outcome, as JSON; parts that it does not name pass."""

import json
import os
import signal
import subprocess
import sys
import time

part = sys.argv[1]
how = json.loads(os.environ.get("NVX_STAND_IN", "{}")).get(part, "pass")


def report(**fields):
    print(json.dumps({"part": part, **fields}), flush=True)


with open(os.environ["NVX_STAND_IN_LOG"], "a") as log:
    log.write(f"{part}\n")
report(figure=1.5)
if how == "pass":
    report(end="passed", tried=3, failed=0)
elif how == "fail":
    report(failed="all_reduce f32", why="wrong output")
    report(end="failed", tried=3, failed=1)
    sys.exit(1)
elif how == "skip":
    report(end="skipped", why="no such thing here")
elif how == "hang":
    child = subprocess.Popen(["sleep", "600"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.environ["NVX_STAND_IN_LOG"] + ".child", "w") as file:
        file.write(f"{child.pid}\n")
    time.sleep(600)
elif how == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "garbage":
    sys.stdout.buffer.write(b"\xff\xfe{not json\n[1, 2]\n{\n" + b"[" * 100_000 + b"\n" + b'{"a":' * 100_000 + b"\n")
    print("a last word")
