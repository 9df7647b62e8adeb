"""Common parts of the suites: how this process adopts a backend's name, and how a test's end becomes a verdict."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback

from tests.conformance.rank import FAILED, PASSED, SKIPPED, Verdict


def load_module(file: str) -> None:
    """Loads an nvx torch module in place of the installed one, for the life of the process. Call it before the first
    group."""
    spec = importlib.util.spec_from_file_location("nvx._C", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module")
    sys.modules["nvx._C"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Suite:
    """The tests of one pass, imported in this process. Ranks are forked from it."""

    world_size: int

    def names(self) -> list[str]:
        raise NotImplementedError

    def why_not(self, name: str) -> str | None:
        """The reason why the test cannot run, if it is known without running it."""
        raise NotImplementedError

    def needs_gpu(self, name: str) -> bool:
        """Whether the test requests CUDA and the pass removed that condition."""
        return False

    def run(self, rank: int, name: str, folder: str) -> Verdict:
        """Runs in a rank. `folder` is a folder that all ranks share for this test only."""
        raise NotImplementedError


def pretend(spec):
    """Prepares this process for tests that read the backend's name at import, and returns the alias."""
    believed = spec.one.believes or spec.backend
    os.environ.update(
        BACKEND=believed,
        WORLD_SIZE=str(spec.world_size),
        TEMP_DIR=spec.folder,
        INIT_METHOD=f"file://{spec.folder}/again",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        MASTER_ADDR="127.0.0.1",
    )
    os.environ.pop("MASTER_PORT", None)
    if spec.place.kind != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # noqa: F401  (before anything that registers a backend)

    if spec.module:
        load_module(spec.module)
    for module in spec.imports:
        importlib.import_module(module)
    from tests.conformance import alias as shim
    from tests.conformance import expected

    expected.stand_in()
    from tests.conformance import lifted

    if spec.one.lift_world_size:
        lifted.world_size()
    if spec.one.lift_gpu:
        lifted.gpu(spec.place)
    alias = shim.Alias(believed, spec.backend, ("nccl",) if spec.one.lift_gpu else (), spec.served)
    shim.install(alias)
    declare(spec.backend)
    return alias


def declare(backend: str) -> None:
    """Declares the backend's features to the tests; tests skip a backend that they do not know."""
    from torch.testing._internal.common_distributed import DistTestCases

    features = DistTestCases.backend_feature
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        features[feature] = features[feature] | {backend}
    if backend != "gloo":
        features["plugin"] = features["plugin"] | {backend}


def skipped_at_import(test) -> str | None:
    if getattr(test, "__unittest_skip__", False):
        return test.__unittest_skip_why__ or "skipped without a reason"
    return None


def verdict_of_exit(code) -> Verdict:
    """Torch's decorators skip a test by leaving the process with an exit code."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return Verdict(SKIPPED, skip.message)
    return Verdict(PASSED) if not code else Verdict(FAILED, f"left with exit code {code}")


def from_test_on(error: BaseException, file_name: str) -> str:
    """The traceback from the first frame of that file; the frames above are the same in every test."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [i for i, frame in enumerate(frames) if frame.filename.endswith(file_name)]
    for _ in range(inner[0] if inner else 0):
        error.__traceback__ = error.__traceback__.tb_next
    return "".join(traceback.format_exception(error))
