"""Tensor parallelism times FSDP2 over a DeviceMesh: NVX_AS=gloo torchrun --nproc-per-node 4 examples/mesh.py"""

import compare
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    torch.manual_seed(mesh["data"].get_local_rank())
    for _ in run.steps(30):
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.done(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    compare.main(train, ranks=4)
