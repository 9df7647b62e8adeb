"""One rank: a process that stays alive and runs the tests that the host sends."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
ABSENT = "absent"  # the verdict of a rank that the test does not use
NO_TEST = "runTest"  # a case of this name has no test: its group is made and destroyed


@dataclass
class Verdict:
    """The result of one test on one rank."""

    outcome: str
    text: str = ""
    groups: int = 0  # that nvx served by another name


def serve(suite, rank: int, pipe, log: str) -> None:
    """Runs tests until the host closes the pipe. Never returns."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = open(log, "wb", buffering=0)  # noqa: SIM115  (it lives as long as the process)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    with contextlib.suppress(EOFError):
        while True:
            test, folder = pipe.recv()
            output.truncate(0)
            output.seek(0)
            with _restoring_process():
                verdict = suite.run(rank, test, folder)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send(verdict)
    os._exit(0)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def _restoring_process():
    """Tests change the environment, debug level and default dtype; the next test must not see that."""
    import torch
    import torch.distributed as dist

    environment, dtype, here = dict(os.environ), torch.get_default_dtype(), os.getcwd()
    dist.set_debug_level_from_env()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(here)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
