"""torchrun over two agents, which restart all ranks after one has died: python examples/elastic.py

On two hosts: NVX_AS=gloo torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d
--rdzv-endpoint FIRST_HOST:29500 examples/elastic.py, on each.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import compare
import torch
import torch.distributed as dist


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in run.steps(30):
        if attempt == 0 and step == 10 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = torch.randn(16, 512), torch.randn(16, 512)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.done(model.parameters())
    dist.destroy_process_group()


def two_agents():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=example", "--local-addr=127.0.0.1",
        __file__,
    ]  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # compare.py's, at its time limit
    with contextlib.ExitStack() as stack:
        agents = []
        for _ in range(2):
            agents.append(subprocess.Popen(agent))
            stack.callback(agents[-1].terminate)  # a killed agent would leave its ranks running
        return int(any([one.wait(timeout=240) for one in agents]))


if __name__ == "__main__":
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        train()
    elif compare.RESULT in os.environ:
        sys.exit(two_agents())
    else:
        compare.main(train, command=[sys.executable, __file__])
