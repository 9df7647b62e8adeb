"""Transformers' Trainer accepts gloo only on CPUs: NVX_AS=gloo torchrun --nproc-per-node 2 examples/trainer.py"""

import tempfile
import time

import compare
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Steps(TrainerCallback):
    def __init__(self, run):
        self.run = run

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.run.tick(self.began)


def train():
    run = compare.Run()
    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=2, n_head=4, use_cache=False)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (320, 32))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", max_steps=100, per_device_train_batch_size=4, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=1,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        Trainer(model, arguments, train_dataset=data, callbacks=[Steps(run)]).train()
    run.done(model.parameters())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
