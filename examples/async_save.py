"""Checkpoints in the background of training: NVX_AS=gloo torchrun --nproc-per-node 2 examples/async_save.py"""

import shutil
import tempfile

import compare
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    aside = dist.new_group()  # the background thread needs a group of its own
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    saving, saved = None, None
    for step in run.steps(30):
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            saved = [p.to_local().clone() for p in model.parameters()]
            saving = dcp.async_save(model.state_dict(), checkpoint_id=folder[0], process_group=aside)
    saving.result()
    trained = [p.to_local().clone() for p in model.parameters()]
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(p.to_local(), s) for p, s in zip(state.values(), saved, strict=True))
    run.done(trained)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
