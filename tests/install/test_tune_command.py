"""`nvx tune`: what it measures, chooses and writes, and that a job follows the file."""

import os
import random
import re
import subprocess
import time
import types

import nvx as nvx_module
import torch
import warm
from nvx import cli
from nvx.bench import world
from nvx.bench.sizes import parse_size
from nvx.commands import status, tune


def nvx(*arguments):
    return warm.run(["-m", "nvx.cli", *arguments], capture_output=True, text=True, timeout=300, check=False)


OPTIONS = types.SimpleNamespace(device="cpu", ranks=2)
CASES = [("reduce", size) for size in (8, 1024, 2048, 4096)]
MOST = {"limit": 1 << 20, "small": 1 << 40, "middle": 1 << 40}


def decided(rounds, defaults, most=MOST):
    """The decision on limits from rounds of {candidate: times of CASES}."""
    step = tune.Step({tuple(defaults): ("reduce",)}, [], dict.fromkeys(rounds[0], "a setting"))
    rounds = [{name: dict(zip(CASES, times, strict=True)) for name, times in one.items()} for one in rounds]
    found = tune.chosen(step, rounds, defaults, most, OPTIONS)
    (why,) = {why for _, why in found.values()}
    return [value for value, _ in found.values()], why


def test_tune_chooses_the_limits_that_take_the_least_time():
    first = {"one_shot": (1, 2, 4, 9), "pipelined": (3, 3, 5, 8)}
    faster = "2K gains 12.5 % in the median, 12.5 to 12.5 % over the rounds"
    assert decided([first] * 3, {"limit": 4096}) == ([2048], faster)
    assert decided([first], {"limit": 4096}) == ([2048], faster), "one round decides for itself"
    assert decided([first] * 3, {"limit": 2048}) == ([2048], "no other value is faster")
    close = {"one_shot": (1, 2, 4, 9), "pipelined": (3, 3, 5, 8.9)}
    why = "2K gains 1.1 % in the median, 1.1 to 1.1 % over the rounds: less than 3 %"
    assert decided([close] * 3, {"limit": 4096}) == ([4096], why)
    another = first | {"another": (9, 9, 9, 4)}
    assert decided([another] * 3, {"small": 1 << 40, "middle": 1 << 40})[0] == [2048, 2048]
    bounded = decided([first] * 3, {"limit": 0}, {"limit": 1500})
    assert bounded[0] == [1024], "a job refuses a value above the key's bound"
    assert tune.planned("all_gather", 64, OPTIONS) == 32 and tune.planned("reduce_scatter", 64, OPTIONS) == 64


def test_tune_chooses_the_number_that_takes_the_least_time():
    case, step = ("all_reduce", 8), tune.numbers("lease", [8], "1M 8M")

    def number(*rounds):
        rounds = [{name: {case: time} for name, time in zip(step.candidates, one, strict=True)} for one in rounds]
        return tune.chosen(step, rounds, {"lease": 3 << 20}, {}, OPTIONS)["lease"]

    assert number((10.0, 9.9, 9.0))[0] == 8 << 20
    why = "1M gains 1.0 % in the median, 1.0 to 1.0 % over the rounds: less than 3 %"
    assert number((10.0, 9.9, 9.9)) == (3 << 20, why)


def test_tune_keeps_the_default_where_the_difference_is_noise():
    """A value that follows the noise of some rounds gains in the others as often as it loses."""
    rounds = [{"one_shot": (1, 2, 4, 9), "pipelined": (3, 3, 5, time)} for time in (6, 7, 10, 6, 7)]
    value, why = decided(rounds, {"limit": 4096})
    assert value == [4096]
    assert why == "2K gains 28.6 % in the median, -10.0 to 50.0 % over the rounds: within the noise"
    found = []
    for seed in range(300):
        noise = random.Random(seed)
        loud = [{name: [noise.uniform(1, 1.5) for _ in CASES] for name in ("one_shot", "pipelined")} for _ in range(5)]
        found.append(decided(loud, {"limit": 1024})[0] == [1024])
    assert sum(found) > 0.9 * len(found), "the default stays"
    for seed in range(50):
        noise = random.Random(seed)
        rounds = [
            {name: [time * noise.uniform(1, 1.1) for time in times] for name, times in clear.items()}
            for clear in [{"one_shot": (1, 1, 2, 2), "pipelined": (2, 2, 1, 1)}] * 5
        ]
        assert decided(rounds, {"limit": 4096})[0] == [1024], "a difference above the noise is found"


JOB = """
import os, sys, nvx, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("nvx", init_method=f"file://{store}", rank=rank, world_size=2,
                        pg_options=nvx.Options(tune=os.environ.get("OPTION", "")))
for size in map(int, sys.argv[3:]):
    dist.all_reduce(torch.ones(size // 4))
dist.destroy_process_group()
"""


def algorithms(tmp_path, *sizes, option=""):
    """The trace of a job: the algorithm of each all_reduce on rank 0."""
    store = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
    how = {"env": os.environ | {"NVX_DEBUG": "trace", "OPTION": option}, "stderr": subprocess.PIPE, "text": True}
    ranks = [warm.Popen(["-c", JOB, str(rank), str(store), *map(str, sizes)], **how) for rank in range(2)]
    printed = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    return re.findall(r"rank 0 #\d+ all_reduce \d+ bytes: (\w+)", printed[0])


def test_tune_writes_a_file_that_a_job_then_follows(monkeypatch, tmp_path):
    file = tmp_path / "two.tune"
    limited = ("--sizes", "4K,32K", "--rounds", "1", "--write", file)
    output = nvx("tune", "all_reduce.one_shot", "-n", "2", *map(str, limited))
    assert output.returncode == 0, output.stderr
    heading, *rows, verdict = output.stdout.splitlines()
    assert heading.split() == ["collective", "size", "one_shot", "pipelined"]
    assert [row.split()[:2] for row in rows] == [["all_reduce", "4K"], ["all_reduce", "32K"]]
    chosen = re.fullmatch(r"all_reduce\.one_shot = (\w+) \(default 64K\): .* (faster|noise|%|rounds)", verdict)[1]
    assert chosen in ("0", "4K", "32K", "64K")
    text = file.read_text()
    assert f"\nnvx = {nvx_module.__version__}\n" in text and "\nhost = " in text and "\nranks = 2\n" in text
    monkeypatch.setenv("NVX_TUNE", f"@{file}")
    row = next(line for line in nvx("explain").stdout.splitlines() if line.startswith("all_reduce.one_shot"))
    assert row.split()[1:3] == [chosen, "file"]
    file.write_text(re.sub(r"(all_reduce\.one_shot =) \d+", r"\1 8192", text))  # 64 KiB without the file
    assert algorithms(tmp_path, 8192, 32768) == ["reduce_one_shot", "reduce_pipelined"]
    output = algorithms(tmp_path, 8192, option="all_reduce.one_shot=4K")
    assert output == ["reduce_pipelined"], "an option counts before a file"
    file.write_text(file.read_text().replace(f"nvx = {nvx_module.__version__}", "nvx = 0.0.1"))
    assert algorithms(tmp_path, 32768) == ["reduce_one_shot"], "a file of another version counts for nothing"


def test_tune_starts_its_own_ranks_where_a_launcher_has_left_its_variables(monkeypatch):
    for name, value in {"NVX_TUNE": "", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    places = []
    monkeypatch.setattr(tune, "tune", lambda *given: places.append(world.placed()))
    assert tune.main(["lease"]) == 0 and places == [None]


def test_a_signal_ends_the_ranks_that_tune_measures(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = ["-m", "nvx.cli", "tune", "lease", "--sizes", "8"]
    started = warm.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ranks, end = [], time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < end:
        parent = status.parents()
        ranks = [pid for pid in status.below(started.pid, parent) if parent.get(parent.get(pid)) == started.pid]
        time.sleep(0.05)
    started.terminate()
    printed = started.communicate(timeout=60)
    assert started.returncode == 130, printed
    assert len(ranks) == 2 and not status.parents().keys() & set(ranks) and not list(tmp_path.iterdir())


def test_tune_measures_each_key_of_kernels_within_its_bounds():
    """But for the pad, which only gives the defaults of packets and chunks."""
    rows = {row["key"]: row for row in nvx_module._load().tuning(8) if row["link"].startswith("GPUs, ")}
    steps = tune.STEPS["cuda"]
    assert {key for step in steps for keys in step.keys for key in keys} == rows.keys() - {"kernels.pad"}
    items = [item for step in steps for text in step.candidates.values() for item in text.split(",") if item]
    for key, value in (item.split("=") for item in items):
        number, row = parse_size(value), rows[key]
        assert row["least"] <= number <= row["most"] and number % row["multiple"] == 0, (key, value)


def test_tune_names_what_it_cannot_measure(monkeypatch, capsys):
    monkeypatch.setenv("NVX_TUNE", "")  # restores what the command sets
    no_gpu = "torch finds no GPU" if torch.version.cuda else "this torch has no CUDA"
    for arguments, why in (
        (["slice"], "nothing measures slice with --device cpu"),
        (["-n", "1"], "argument -n/--ranks: 1 is below 2"),
        (["--device", "cuda", "kernels.blocks"], f"--device cuda: {no_gpu}"),
        (["--sizes", "4K,x"], "argument --sizes: 'x' is not a size: write 8, 64K, 1M or 2G"),
        (["--write", "/no/such/folder/two.tune"], "No such file or directory: '/no/such/folder/two.tune'"),
    ):
        try:
            code = cli.main(["tune", *arguments])
        except SystemExit as ended:
            code = ended.code
        assert code == 2 and why in capsys.readouterr().err, arguments
