"""Each script of examples/ trains over gloo and over nvx, and must end with the same weights. `make test-frameworks`
installs the frameworks; a script whose framework is missing is skipped."""

import os
import pathlib
import subprocess
import sys
from importlib import util

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
# script: the package that it needs besides torch
NEEDS = {
    "accelerate_ddp": "accelerate",
    "async_save": None,
    "deepspeed_zero": "deepspeed",
    "elastic": None,
    "fabric": "lightning",
    "lightning_ddp": "lightning",
    "megatron_layers": "megatron.core",
    "mesh": None,
    "notebook": "accelerate",
    "pipeline": None,
    "ray_train": "ray",
    "torchft_replicas": "torchft",
    "torchrec_tables": "torchrec",
    "trainer": "transformers",
}


def missing(package):
    try:
        return package is not None and util.find_spec(package) is None
    except ModuleNotFoundError:  # the package above it
        return True


def test_every_script_is_a_test():
    assert sorted(NEEDS) == sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "compare")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_recipe(name, record_property):
    if missing(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed: make test-frameworks installs it")
    env = {key: value for key, value in os.environ.items() if not key.startswith("NVX_")}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / f"{name}.py"], env=env, capture_output=True, text=True, timeout=350
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = next(line for line in ended.stdout.splitlines() if line.startswith(f"{name}: gloo "))
    assert "weights equal" in told
    record_property("told", told)
    print(f"\n{told}")
