"""Negative controls: a test's body, run once more on a device that does not keep a promise, must fail. So it is known
that the test would see nvx break the rule that stands on this promise."""

import contextlib

import fake_device
import pytest
from ranks import BACKEND, body_of, call


class Named:
    """A test by its names, as ranks know jobs."""

    def __init__(self, module, name):
        self.module, self.name = module, name


def run_body(rank, world, rule, module, name, given):
    with fake_device.broken(rule) if rule else contextlib.nullcontext():
        call(body_of(Named(module, name)), rank=rank, world=world, **given)


def assert_caught(pool, rule, test, says, **given):
    """That the test passes, and fails by these words where the rule is broken."""
    job = {"module": test.__module__, "name": test.__name__, "given": given, "world": 2}
    job["backend"] = f"cpu:{BACKEND},fakegpu:{BACKEND}"
    pool.run(run_body, rule="", **job)
    with pytest.raises(pytest.fail.Exception, match=says):
        pool.run(run_body, rule=rule, **job)
