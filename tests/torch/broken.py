"""Negative controls: a test's body must fail on a device that breaks a guarantee. This shows that the test detects code
that ignores the rule behind this guarantee."""

import contextlib

import fake_device
import pytest
from ranks import BACKEND, body_of, call


class Named:
    """A test by its names, the form in which ranks receive jobs."""

    def __init__(self, module, name):
        self.module, self.name = module, name


def run_body(rank, world, rule, module, name, given):
    with fake_device.broken(rule) if rule else contextlib.nullcontext():
        call(body_of(Named(module, name)), rank=rank, world=world, **given)


def assert_caught(pool, rule, test, reason, **given):
    """Asserts that the test passes, and that it fails with this text if the rule is broken."""
    job = {"module": test.__module__, "name": test.__name__, "given": given, "world": 2}
    job["backend"] = f"cpu:{BACKEND},fakegpu:{BACKEND}"
    pool.run(run_body, rule="", **job)
    with pytest.raises(pytest.fail.Exception, match=reason):
        pool.run(run_body, rule=rule, **job)
