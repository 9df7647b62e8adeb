import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Interpreter:
    """Runs code in a fresh process, with `path` in front of this process's module path."""

    def __call__(self, code, *, path=None, flags=(), **environment):
        # Variables that a plugin or torchrun set in this process are not the user's environment.
        env = {key: value for key, value in os.environ.items() if not key.startswith(("NVX_", "TORCH_"))}
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env.update(environment)
        command = [sys.executable, *flags, "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False, cwd="/")

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
