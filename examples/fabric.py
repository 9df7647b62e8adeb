"""Lightning's Fabric: NVX_AS=gloo torchrun --nproc-per-node 2 examples/fabric.py"""

import compare
import torch
from lightning import Fabric


def train():
    run = compare.Run()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    torch.manual_seed(fabric.global_rank)
    for _ in run.steps(40):
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        fabric.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    run.done(model.parameters())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
