"""A 1F1B pipeline: NVX_AS=gloo torchrun --nproc-per-node 2 examples/pipeline.py"""

import compare
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [torch.nn.Linear(512, 512) for _ in range(2)]  # the same on all ranks, of which each keeps its own
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    for _ in run.steps(30):
        x, y = torch.randn(64, 512), torch.randn(64, 512)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()
    run.done(layers[rank].parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
