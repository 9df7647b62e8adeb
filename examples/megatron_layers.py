"""Megatron-core's tensor-parallel layers: NVX_AS=gloo torchrun --nproc-per-node 2 examples/megatron_layers.py"""

import compare
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        perform_initialization=True,
        params_dtype=torch.float32,
    )
    init = torch.nn.init.xavier_normal_
    first = ColumnParallelLinear(256, 1024, config=config, init_method=init, gather_output=False)
    second = RowParallelLinear(
        1024, 256, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    head = ColumnParallelLinear(256, 512, config=config, init_method=init, gather_output=False)
    parameters = [p for layer in (first, second, head) for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(2)  # tensor-parallel ranks see the same data
    for _ in run.steps(30):
        x, y = torch.randn(4, 8, 256), torch.randint(0, 512, (4, 8))
        hidden = torch.relu(first(x)[0])
        loss = vocab_parallel_cross_entropy(head(second(hidden)[0])[0], y).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.done(parameters)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
