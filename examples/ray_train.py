"""Ray Train: NVX_AS=gloo python examples/ray_train.py

Ray's workers inherit the variable from the process that starts Ray on this machine; on a cluster, pass it by
ray.init(runtime_env={"env_vars": {"NVX_AS": "gloo"}}). TorchConfig(backend="nvx") is the same without the variable.
"""

import os
import sys
import tempfile

import compare
import torch


def loop():
    from ray.train.torch import prepare_model

    run = compare.Run()
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(torch.distributed.get_rank())
    for _ in run.steps(40):
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.done(model.parameters())


def train():
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    here = os.path.dirname(os.path.abspath(__file__))
    names = ("NVX_AS", compare.RESULT, "PYTHONPATH", "OMP_NUM_THREADS")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    variables["PYTHONPATH"] = os.pathsep.join([here, variables.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            loop, torch_config=TorchConfig(backend="gloo"), scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    compare.main(train, command=[sys.executable, __file__])
