"""`nvx bench --device` over the fake accelerator: it checks results and measures times on the device."""

import json

import overlap
import pytest
import torch
from nvx.bench import cli, sweep, train
from nvx.bench.peers import Unsupported
from nvx.bench.symmetric import SymmetricContender
from nvx.bench.world import World
from ranks import on_fake_gpus, on_ranks, on_simulated_gpus, one_host, only_nvx

pytestmark = [one_host, only_nvx]
BRIEF = ["--sizes", "8,40000", "--blocks", "1", "--iters", "2", "-w", "1"]


def here(rank, world):
    return World(rank, world, torch.device("fakegpu", 0))


def swept(rank, world, folder, *words):
    parsed = cli._sweep_parser().parse_args([*words, *BRIEF, "-J", f"{folder}/found.json"])
    status = sweep.Sweep(here(rank, world), parsed, "nvx bench").run()
    return status, json.loads(open(f"{folder}/found.json").read()) if rank == 0 else None


@on_simulated_gpus(2)
def test_collectives_of_a_device_are_checked_and_timed(rank, world, tmp_path):
    names = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "barrier"]
    status, found = swept(rank, world, tmp_path, *names, "--vs", "null,socket,symm_mem")
    assert status == 0
    if rank == 0:
        rows = [row for row in found["results"] if row["backend"] == "nvx"]
        assert {row["collective"] for row in rows} == set(names)
        assert all(row["time_us"] > 0 and not row["wrong"] for row in rows)
        assert "takes tensors of the CPU" in found["notes"]["socket"] and "CUDA" in found["notes"]["symm_mem"]


@on_fake_gpus(2)
def test_a_wrong_element_on_a_device_is_counted(rank, world, tmp_path):
    status, _ = swept(rank, world, tmp_path, "all_reduce")
    assert status == 0
    fill, sweep.payload.fill = sweep.payload.fill, lambda tensor, *given: tensor.zero_()
    try:
        status, found = swept(rank, world, tmp_path, "all_reduce")
    finally:
        sweep.payload.fill = fill
    assert status == 1


@pytest.mark.slow
@on_fake_gpus(2)
def test_a_product_and_a_step_on_a_device(rank, world, tmp_path):
    common = ["--backend", "nvx", "-J", f"{tmp_path}/found.json"]
    for module, words in (
        (overlap, ["-b", "64K", "--side", "32", "--iters", "2", "--blocks", "1"]),
        (train, ["--kinds", "ddp", "--iters", "1", "--blocks", "1"]),
    ):
        parser = cli.argparse.ArgumentParser()
        cli.common(parser)
        module.add_arguments(parser)
        assert module.run(here(rank, world), parser.parse_args([*common, *words]), "nvx bench") == 0
        if rank == 0:
            found = json.loads((tmp_path / "found.json").read_text())
            first = {"overlap": "alone", "train": "nvx"}[found["what"]]
            assert found["results"][0]["backend"] == first and found["results"][0]["time_us"] > 0


@on_ranks(1)
def test_symmetric_memory_is_of_cuda(rank, world):
    with pytest.raises(Unsupported, match="--device cuda"):
        SymmetricContender("symm_mem", World(rank, world, torch.device("cpu")))


def test_without_a_gpu_the_device_is_refused(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for words in (["all_reduce", "--device", "cuda"], ["train", "--device", "cuda"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert "--device cuda: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["all_reduce", "-G"])
