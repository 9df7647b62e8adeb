"""NVTX ranges: a tool that `NVTX_INJECTION64_PATH` names, as Nsight Systems is started, sees nvx's calls."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import simulated
from ranks import only_nvx

pytestmark = only_nvx
HERE = pathlib.Path(__file__).resolve().parent

# Two ranks of CPU tensors; the module is the simulated one where that is built.
PROGRAM = """
import sys
if sys.argv[3]:
    sys.path.insert(0, sys.argv[3])
    import simulated
    simulated.load()
import torch, torch.distributed as dist, nvx
if not nvx._load().build_info()["nvtx"]:
    sys.exit(77)
dist.init_process_group("nvx", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(1000))
dist.broadcast(torch.ones(10), 0, async_op=True).wait()
if dist.get_rank() == 0:
    dist.send(torch.ones(3), 1)
else:
    dist.recv(torch.ones(3), 0)
dist.destroy_process_group()
"""


def headers():
    """The folder of NVTX's headers, or None."""
    import torch

    site = pathlib.Path(torch.__file__).parents[1]
    roots = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), site / "nvidia/cu13", site / "nvidia/nvtx"]
    return next((r for r in roots if pathlib.Path(r, "include/nvtx3/nvToolsExt.h").exists()), None)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    root = headers()
    if root is None or shutil.which("g++") is None:
        pytest.skip("NVTX's headers, which come with CUDA, or g++ are not here")
    library = tmp_path_factory.mktemp("nvtx") / "librecorder.so"
    source = HERE / "nvtx_recorder" / "recorder.cc"
    command = ["g++", "-shared", "-fPIC", f"-I{root}/include", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def ranges_of_ranks(folder, library):
    """The lines that the tool of each rank wrote."""
    where = str(HERE) if simulated.module() else ""
    ranks = []
    for rank in range(2):
        surroundings = {**os.environ, "NVX_TEST_RANGES": str(folder / f"{rank}.txt")}
        if library:
            surroundings["NVTX_INJECTION64_PATH"] = str(library)
        command = [sys.executable, "-c", PROGRAM, str(folder / "store"), str(rank), where]
        ranks.append(subprocess.Popen(command, env=surroundings))
    codes = [process.wait(timeout=120) for process in ranks]
    if codes == [77, 77]:
        pytest.skip("this build has no NVTX ranges: it has no kernels, or NVTX's headers were not found")
    assert codes == [0, 0]
    files = [folder / f"{rank}.txt" for rank in range(2)]
    return [file.read_text().splitlines() if file.exists() else None for file in files]


@pytest.mark.simulated
def test_nvtx_ranges_of_calls(recorder, tmp_path):
    for rank, lines in enumerate(ranges_of_ranks(tmp_path, recorder)):
        pushed = [line.removeprefix("push nvx ") for line in lines if line.startswith("push nvx ")]
        assert pushed == ["all_reduce 4000", "broadcast 40", f"{'recv' if rank else 'send'} 12"]
        assert lines.count("pop nvx") == len(pushed) == len(lines) / 2


@pytest.mark.simulated
def test_nvtx_ranges_without_a_tool(recorder, tmp_path):
    assert ranges_of_ranks(tmp_path, None) == [None, None]
