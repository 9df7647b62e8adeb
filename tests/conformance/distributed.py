"""Torch's DistributedTest, the suite in the torch wheel."""

from __future__ import annotations

import gc
import os
import random
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

from tests.conformance.rank import FAILED, NO_TEST, PASSED, SKIPPED, Verdict
from tests.conformance.suite import Suite, from_test_on, pretend, skipped_at_import, verdict_of_exit


class DistributedSuite(Suite):
    def __init__(self, spec):
        self.alias = pretend(spec)
        from torch.testing._internal.distributed import distributed_test as tests

        from tests.conformance.alias import install_in

        install_in(tests, self.alias)
        self.tests, self.case, self.world_size = tests, _case(tests), spec.world_size
        self.served, self.backend = spec.served, spec.backend

    def names(self) -> list[str]:
        return sorted(name for name in dir(self.case) if name.startswith("test"))

    def why_not(self, name: str) -> str | None:
        return skipped_at_import(getattr(self.case, name))

    def needs_gpu(self, name: str) -> bool:
        from tests.conformance.lifted import needs_gpu

        return needs_gpu(getattr(self.case, name))

    def run(self, rank: int, name: str, folder: str) -> Verdict:
        import torch.distributed as dist

        os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/again")
        self.tests.INIT_METHOD = os.environ["INIT_METHOD"]
        case = self.case(name)
        case.rank, case.file_name = rank, f"{folder}/store"
        before = self._groups()
        try:
            with self.alias.unaliased_in(name):
                verdict = self._in_group(case, name)
        except (Exception, SystemExit):
            verdict = Verdict(FAILED, "outside the test: " + traceback.format_exc())
        verdict.groups = self._groups() - before
        if verdict.outcome != FAILED:  # after a failure the host takes new ranks
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
        return verdict

    def _groups(self) -> int:
        if not self.served:
            return 0
        import nvx

        return nvx.stand_in.served()[1]

    def _in_group(self, case, name: str) -> Verdict:
        """Torch's `TestDistBackend._run`, for a process that continues afterwards."""
        import torch.distributed as dist
        from torch.testing._internal import common_utils

        seconds = self.tests.CUSTOM_PG_TIMEOUT.get(name, self.tests.default_pg_timeout)
        dist.init_process_group(
            init_method=case.init_method,
            backend=self.tests.BACKEND,
            world_size=self.world_size,
            rank=case.rank,
            timeout=timedelta(seconds=seconds),
        )
        group = dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0])
        made = getattr(group, "wrapped_pg", group).name()
        wanted = self.backend if self.alias.lying or self.served else self.alias.believed
        if made != wanted:
            return Verdict(FAILED, f"the group is of {made}, not of {wanted}")
        case._barrier()
        if name == NO_TEST:
            return Verdict(PASSED)
        common_utils.set_rng_seed()
        random.seed(common_utils.SEED)
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return Verdict(SKIPPED, str(skip))
        except SystemExit as leave:
            return verdict_of_exit(leave.code)
        except Exception as error:
            return Verdict(FAILED, from_test_on(error, "distributed_test.py"))
        case._barrier()
        return Verdict(PASSED)


def _case(tests) -> type:
    class ConformanceTest(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        """Torch's class, unchanged except for a barrier that does not sleep 0.1 s between polls."""

        def _barrier(self, wait_for=None, timeout=10):
            import torch.distributed as dist

            self._barriers = getattr(self, "_barriers", 0) + 1
            here = Path(os.environ["TEMP_DIR"], "barrier")
            Path(here, f"{self._barriers}.{os.getpid()}").touch()
            wanted = wait_for or dist.get_world_size()
            deadline = time.monotonic() + timeout
            while len(list(here.glob(f"{self._barriers}.*"))) < wanted:
                if time.monotonic() > deadline:
                    raise RuntimeError("barrier timeout")
                time.sleep(0.002)

    return ConformanceTest
