"""Runs an example over gloo and over nvx, compares the weights bit for bit, and prints both times.

python examples/accelerate_ddp.py                                             # this comparison
EXAMPLE_PAIRS=9 python examples/accelerate_ddp.py                             # nine runs each, in turn: the medians
NVX_AS=gloo torchrun --nproc-per-node 2 examples/accelerate_ddp.py            # the example alone, over nvx
"""

import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

RESULT = "EXAMPLE_RESULT"  # the file for the result of a run that is compared
PAIRS = "EXAMPLE_PAIRS"  # how many runs each: on a busy machine one pair proves little
WARM_UP = 5


class Run:
    """The clock and the fingerprint of one training run. A rank makes it before its first step."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.times = []

    def steps(self, count):
        """Yields `count` step numbers and notes how long each step takes."""
        for step in range(count):
            began = time.perf_counter()
            yield step
            self.tick(began)

    def tick(self, began):
        self.times.append(time.perf_counter() - began)

    def done(self, tensors):
        """Call it on every rank with its weights, while the group is alive."""
        digest = hashlib.sha256()
        for tensor in tensors:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest.hexdigest())
        times = sorted(self.times[WARM_UP:] or self.times)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        facts = {
            "sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "step_ms": 1e3 * times[len(times) // 2],
            "runs": backend.name(),
        }
        if dist.get_rank() == 0:
            print(f"{facts['runs']}: {facts['step_ms']:.2f} ms a step, weights {facts['sha256'][:16]}", flush=True)
            if RESULT in os.environ:
                pathlib.Path(os.environ[RESULT]).write_text(json.dumps(facts))


def launched():
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ or RESULT in os.environ


def torchrun(script, ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]


def run(command, served):
    """One run in processes of its own. Returns the report of Run.done()."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        env = {key: value for key, value in os.environ.items() if not key.startswith("NVX_AS")}
        env |= {RESULT: str(result), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"NVX_AS": "gloo"} if served else {}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                output = process.communicate(timeout=300)[0]
            except subprocess.TimeoutExpired:
                process.terminate()  # a killed launcher would leave its ranks running
                output = process.communicate(timeout=60)[0] + "\nended by the limit of 300 s"
        if process.returncode != 0 or not result.exists():
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}\n{output}")
        return json.loads(result.read_text())


def main(train, ranks=2, command=None):
    """`train` on a rank; without a launcher, the comparison. `command`: how to start it, if not by torchrun."""
    if launched():
        return train()
    script = sys.argv[0]
    command = command or torchrun(script, ranks)
    name = pathlib.Path(script).stem
    pairs = [[run(command, served) for served in (False, True)] for _ in range(max(1, int(os.environ.get(PAIRS, "1"))))]
    for gloo, nvx in pairs:
        if (gloo["runs"], nvx["runs"]) != ("gloo", "nvx"):
            raise SystemExit(f"{name}: {gloo['runs']} and {nvx['runs']} ran instead of gloo and nvx")
        if gloo["sha256"] != nvx["sha256"]:
            raise SystemExit(f"{name}: weights DIFFER: gloo {gloo}, nvx {nvx}")
    digest = pairs[0][0]["sha256"]
    gloo, nvx, ratio = (
        statistics.median(figures)
        for figures in zip(*((g["step_ms"], n["step_ms"], g["step_ms"] / n["step_ms"]) for g, n in pairs), strict=True)
    )
    print(f"{name}: gloo {gloo:.2f} ms, nvx {nvx:.2f} ms a step, gloo / nvx {ratio:.2f}, weights equal: {digest[:16]}")
