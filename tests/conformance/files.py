"""Runs any file of tests based on torch's multi-process test classes, unchanged, in ranks that stay alive.

Such a file names its backend in a literal, so it runs under the alias. Its `dist.ProcessGroupGloo` is the backend
under test as well."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import sys
import unittest
from datetime import timedelta
from pathlib import Path

from tests.conformance.rank import ABSENT, FAILED, NO_TEST, PASSED, SKIPPED, Verdict
from tests.conformance.suite import Suite, from_test_on, pretend, skipped_at_import, verdict_of_exit


class FileSuite(Suite):
    def __init__(self, spec):
        self.alias = pretend(spec)
        self.world_size = spec.world_size
        if self.alias.lying:
            _stand_in_for_gloo(spec.backend)
        self.path = Path(spec.file)
        self.cases = {f"{case.__name__}.{name}": (case, name) for case, name in _tests_in(_import(self.path))}

    def names(self) -> list[str]:
        return list(self.cases)

    def why_not(self, name: str) -> str | None:
        case, method = self.cases[name]
        return skipped_at_import(case) or skipped_at_import(getattr(case, method))

    def run(self, rank: int, name: str, folder: str) -> Verdict:
        import torch.distributed as dist

        if name == NO_TEST:
            return Verdict(PASSED)
        case, method = self.cases[name]
        try:
            verdict = self._run(case, method, rank, folder)
        except unittest.SkipTest as skip:
            verdict = Verdict(SKIPPED, str(skip))
        except SystemExit as leave:
            verdict = verdict_of_exit(leave.code)
        except Exception as error:
            verdict = Verdict(FAILED, from_test_on(error, self.path.name))
        if verdict.outcome != FAILED:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
        return verdict

    def _run(self, case: type, method: str, rank: int, folder: str) -> Verdict:
        from torch.testing._internal import common_distributed as common

        if issubclass(case, common.MultiProcContinuousTest):
            return self._run_continuous(case, method, rank, folder)
        if not issubclass(case, common.MultiProcessTestCase):
            return _run_alone(case, method) if rank == 0 else Verdict(ABSENT)
        with _no_processes(case):
            one = case(method)
            one.setUp()  # sets the environment that started processes would inherit
        if rank >= int(one.world_size):
            return Verdict(ABSENT)
        if int(one.world_size) > self.world_size:
            return Verdict(SKIPPED, f"wants {one.world_size} ranks")
        ours, theirs = multiprocessing.Pipe()
        try:
            case._run(rank, method, f"{folder}/store", theirs)
        except SystemExit as leave:
            if leave.code == case.TEST_ERROR_EXIT_CODE and ours.poll():
                return Verdict(FAILED, str(ours.recv()))
            return verdict_of_exit(leave.code)
        return Verdict(PASSED)

    def _run_continuous(self, case: type, method: str, rank: int, folder: str) -> Verdict:
        case.rank, case.world_size = rank, self.world_size
        case._init_pg(rank, self.world_size, f"{folder}/store")
        case._run_test_given_id(f"{case.__name__}.{method}")
        return Verdict(PASSED)


def _import(path: Path):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _tests_in(module) -> list[tuple[type, str]]:
    loader = unittest.TestLoader()
    cases = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
    ]
    return [(case, name) for case in cases for name in loader.getTestCaseNames(case)]


def _run_alone(case: type, method: str) -> Verdict:
    """Runs a test of one process."""
    result = unittest.TestResult()
    unittest.TestSuite([case(method)]).run(result)
    if result.skipped:
        return Verdict(SKIPPED, result.skipped[0][1])
    wrong = result.failures + result.errors
    return Verdict(FAILED, wrong[0][1]) if wrong else Verdict(PASSED)


class _no_processes:  # noqa: N801  (reads as a statement)
    """Within this context, a case's setUp starts no processes, because the ranks already exist."""

    def __init__(self, case: type):
        self.case = case

    def __enter__(self):
        self.case._spawn_processes = lambda *_args, **_kwargs: None

    def __exit__(self, *_):
        del self.case._spawn_processes


def _stand_in_for_gloo(backend: str) -> None:
    """Makes `torch.distributed.ProcessGroupGloo(...)` the backend under test. Torch's own use of gloo is unchanged."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    gloo = c10d.ProcessGroupGloo
    plugin = dist.Backend._plugins[backend.upper()]

    class Meta(type):
        def __instancecheck__(cls, one):
            return isinstance(one, gloo) or type(one).__name__.lower().endswith(backend)

        def __getattr__(cls, name):
            return getattr(gloo, name)

    class ProcessGroupGloo(metaclass=Meta):
        def __new__(cls, store, rank, size, how=None, timeout=None):
            given = c10d._DistributedBackendOptions()
            given.store, given.group_rank, given.group_size = store, rank, size
            given.timeout = timeout or getattr(how, "_timeout", how) or timedelta(minutes=30)
            given.group_id, given.global_ranks_in_group = "", list(range(size))
            return plugin.creator_fn(given, None)

    dist.ProcessGroupGloo = ProcessGroupGloo
    # Tests call it on a group and drop the device that it makes.
    torch._C._distributed_c10d.Backend.create_device = gloo.create_device
