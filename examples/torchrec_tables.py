"""torchrec's sharded embedding tables: NVX_AS=gloo torchrun --nproc-per-node 2 examples/torchrec_tables.py"""

import compare
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=64, num_embeddings=1000, feature_names=[f"f{i}"])
            for i in range(4)
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = torch.nn.Linear(256, 1)

    def forward(self, features):
        return self.over(self.tables(features).values())


def train():
    run = compare.Run()
    dist.init_process_group("gloo")
    model = DistributedModelParallel(Model(), device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in run.steps(30):
        lengths = torch.full((4 * 32,), 5)
        features = KeyedJaggedTensor([f"f{i}" for i in range(4)], torch.randint(0, 1000, (640,)), lengths=lengths)
        model(features).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.done(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    compare.main(train)
