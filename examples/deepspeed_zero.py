"""DeepSpeed's ZeRO 1 to 3: NVX_AS=gloo torchrun --nproc-per-node 2 examples/deepspeed_zero.py [STAGE]

deepspeed.init_distributed("nvx") is the same without the variable.
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import compare  # noqa: E402
import deepspeed  # noqa: E402
import torch  # noqa: E402


def train(stage):
    run = compare.Run()
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config, dist_init_required=False
    )
    torch.manual_seed(torch.distributed.get_rank())
    for _ in run.steps(30):
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    run.done(weights)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    compare.main(lambda: train(stage), command=[*compare.torchrun(sys.argv[0], 2), str(stage)])
