"""Each script of examples/ trains over gloo and over nvx, and must end with the same weights. `make test-frameworks`
installs the frameworks; a script whose framework is missing is skipped. RECORD=FILE writes the times to that file."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "frameworks.md"
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
DISTRIBUTIONS = {"megatron.core": "megatron-core", "torchft": "torchft-nightly"}
# Scripts in which, by the page, the name "nvx" does the same as NVX_AS, and their ranks.
BY_NAME = {
    "async_save": 2,
    "deepspeed_zero": 2,
    "lightning_ddp": 2,
    "megatron_layers": 2,
    "mesh": 4,
    "pipeline": 2,
    "ray_train": 0,  # starts them itself
    "torchrec_tables": 2,
}
SUMMARY = re.compile(r"gloo ([\d.]+) ms, nvx ([\d.]+) ms a step, gloo / nvx ([\d.]+), weights equal(?:: (\w+))?")


def missing(package):
    try:
        return package is not None and util.find_spec(package) is None
    except ModuleNotFoundError:  # the package above it
        return True


def skip_without(name):
    if missing(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed: make test-frameworks installs it")


def run(*command, **variables):
    env = {key: value for key, value in os.environ.items() if not key.startswith("NVX_")}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", **variables}
    ended = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=350)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def version_of(package):
    name = DISTRIBUTIONS.get(package, package) or "torch"
    return f"{name} {metadata.version(name)}"


@pytest.fixture(scope="module")
def results():
    """A list of rows, which becomes the file of RECORD."""
    rows = []
    yield rows
    if rows and "RECORD" in os.environ:
        from nvx.bench import machine

        arguments = {"pairs": int(os.environ.get("EXAMPLE_PAIRS", "1"))}
        command = f"RECORD={os.environ['RECORD']} EXAMPLE_PAIRS={arguments['pairs']} make test-frameworks"
        machine.write(os.environ["RECORD"], machine.document("frameworks", command, arguments, results=rows))


def test_every_script_is_a_test():
    assert sorted(NEEDS) == sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "compare")


def rows():
    """Of the page's table: framework, line, script, ratio."""
    cells = re.findall(
        r"^\| (.+) \| (.+) \| \[\w+\.py\]\(\.\./examples/(\w+)\.py\) \| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert sorted(script for _, _, script, _ in cells) == sorted(NEEDS)
    return cells


def test_the_page_has_the_figures_of_the_file():
    file = json.loads((ROOT / "bench" / "results" / "frameworks.json").read_text())
    measured = {row["recipe"]: f"{row['ratio']:.1f}" for row in file["results"]}
    assert {script: ratio for _, _, script, ratio in rows()} == measured


def test_the_page_has_the_versions_that_are_pinned():
    pins = "".join(path.read_text() for path in Path(__file__).parent.glob("requirements*.txt"))
    pinned = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\d+\.\d+)", pins, re.MULTILINE))
    stated = [re.match(r"([\w-]+)(?: Train)? (\d+\.\d+)", framework) for framework, *_ in rows()]
    stated = {(one[1].lower(), one[2]) for one in stated if one}
    assert len(stated) >= 7 and stated <= set(pinned.items())


def test_the_lines_are_those_of_the_scripts():
    assert {script for _, line, script, _ in rows() if '"nvx"' in line} == set(BY_NAME)
    for _, line, script, _ in rows():
        text = (EXAMPLES / f"{script}.py").read_text()
        for call, arguments in re.findall(r"`(?:[\w.]+\.)?(\w+)\((.+?)\)`", line):
            assert call in text and (script == "torchft_replicas" or arguments.replace("nvx", "gloo") in text), line


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_recipe(name, record_property, results, tmp_path):
    skip_without(name)
    line = next(line for line in run(EXAMPLES / f"{name}.py").splitlines() if line.startswith(f"{name}: gloo "))
    gloo, nvx, ratio, digest = SUMMARY.search(line).groups()
    record_property("result", line)
    print(f"\n{line}")
    if name in BY_NAME:
        by_name = over_nvx_by_name(name, tmp_path)
        assert (by_name["runs"], by_name["sha256"][:16]) == ("nvx", digest)
    row = {"recipe": name, "gloo_ms": float(gloo), "nvx_ms": float(nvx), "ratio": float(ratio)}
    results.append(row | {"weights": "equal", "package": version_of(NEEDS[name])})


def over_nvx_by_name(name, folder):
    """The result of a run of the script that names "nvx" where it named "gloo", without NVX_AS."""
    shutil.copy(EXAMPLES / "compare.py", folder)
    script, result = folder / f"{name}.py", folder / "result.json"
    script.write_text((EXAMPLES / f"{name}.py").read_text().replace('"gloo"', '"nvx"'))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={BY_NAME[name]}"]
    run(*(launcher if BY_NAME[name] else ()), script, EXAMPLE_RESULT=str(result))
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_other_stages_of_zero(stage):
    skip_without("deepspeed_zero")
    assert "weights equal" in run(EXAMPLES / "deepspeed_zero.py", str(stage))


def test_torchft_makes_its_groups_over_nvx():
    pytest.importorskip("torchft")
    from nvx.torchft import ProcessGroupNVX

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupNVX(timeout=timedelta(seconds=10))
    made = group._create_pg(dist.PrefixStore("ft", server), 0, 1)
    assert made._get_backend(torch.device("cpu")).name() == "nvx"
    assert group.getBackendName() == "torchft-nvx"
    made.abort()
