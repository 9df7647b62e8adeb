"""Lightning takes any backend's name, here gloo: NVX_AS=gloo torchrun --nproc-per-node 2 examples/lightning_ddp.py"""

import time

import compare
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Finish(lightning.Callback):
    def __init__(self, run):
        self.run = run

    def on_train_batch_start(self, *_):
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.run.tick(self.began)

    def on_train_end(self, trainer, module):
        self.run.done(module.parameters())


def train():
    run = compare.Run()
    data = torch.utils.data.TensorDataset(torch.randn(1280, 256), torch.randn(1280, 256))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=40, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Finish(run)],
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16))


if __name__ == "__main__":
    compare.main(train)
