"""Accelerate, which accepts only gloo on CPUs: NVX_AS=gloo torchrun --nproc-per-node 2 examples/accelerate_ddp.py"""

import compare
import torch
from accelerate import Accelerator


def train():
    run = compare.Run()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    data = torch.utils.data.TensorDataset(torch.randn(1280, 256), torch.randn(1280, 256))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    batches = iter(loader)
    for _ in run.steps(40):
        x, y = next(batches)
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses = accelerator.gather(loss.detach().reshape(1))
    assert losses.shape == (accelerator.num_processes,)
    run.done(accelerator.unwrap_model(model).parameters())
    accelerator.end_training()


if __name__ == "__main__":
    compare.main(train)
