import os
import pathlib
import subprocess
import sys

import pytest
import warm

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Interpreter:
    """Runs code in a fresh process, with `path` in front of this process's module path; `imported`: in one that has
    imported torch already."""

    def __call__(self, code, *, path=None, flags=(), imported=False, **environment):
        # Variables that a plugin or torchrun set in this process are not the user's environment.
        env = {key: value for key, value in os.environ.items() if not key.startswith(("NVX_", "TORCH_"))}
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env.update(environment)
        how = {"env": env, "capture_output": True, "text": True, "timeout": 300, "check": False, "cwd": "/"}
        if imported:
            return warm.run(["-c", code], **how)
        return subprocess.run([sys.executable, *flags, "-c", code], **how)

    def output(self, code, **how):
        """Standard output of code that must succeed."""
        ended = self(code, **how)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


@pytest.fixture(scope="session")
def python():
    return Interpreter()


@pytest.fixture(scope="session")
def root():
    return ROOT
