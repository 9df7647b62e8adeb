"""`nvx demo`: trains a small model with DDP and FSDP2 on two CPU ranks, over nvx and over gloo side by side.

The model is bound by communication: 18 million parameters, batch 4. Both backends start from the same weights and see
the same data. They alternate in the same processes, a few steps each, so that other load on the machine affects both
alike. The demo prints a table of step times, and fails if the weights differ. Beyond two ranks the backends add in
different orders, and the weights may differ by rounding.
"""

import argparse
import dataclasses
import datetime
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import nvx

from . import interrupts
from .bench.sizes import above
from .bench.train import BATCH, stepper, wrapped

BATCHES = 2  # so few that the loss falls within the demo
BACKENDS = ("nvx", "gloo")
ROUNDING = 1e-5  # difference of weights that other orders of addition explain; two ranks have one order only
STRATEGIES = ("DDP", "FSDP2")
TURN = 4  # steps that one backend trains before the other continues


class Trainer:
    """One model under one strategy over one backend."""

    def __init__(self, strategy, group):
        cpu = torch.device("cpu")
        self.model = wrapped(strategy.lower(), group, cpu)
        self.train = stepper(self.model, dist.get_rank(group), cpu, BATCHES, rate=0.2)
        self.times, self.losses = [], []

    def step(self):
        start = time.perf_counter()
        loss = self.train()
        self.times.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def weights(self):
        """Full tensors by name; sharded tensors are gathered."""
        full = {}
        for name, value in getattr(self.model, "module", self.model).state_dict().items():
            full[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        return full


class Bar:
    """A progress bar on a terminal; elsewhere a line for every tenth of the work."""

    def __init__(self, total):
        self.total, self.done, self.shown = total, 0, -1
        self.quiet, self.terminal = dist.get_rank() != 0, sys.stderr.isatty()

    def advance(self, steps, label):
        self.done += steps
        tenth = 10 * self.done // self.total
        if self.quiet or (not self.terminal and tenth == self.shown):
            return
        self.shown = tenth
        filled = 30 * self.done // self.total
        line = f"  [{'#' * filled:.<30}] {self.done}/{self.total} steps  {label:<16}"
        end = "\r" if self.terminal and self.done < self.total else "\n"
        print(line, end=end, file=sys.stderr, flush=True)


@dataclasses.dataclass
class Row:
    strategy: str
    millis: dict  # backend -> median step
    losses: tuple  # first and last, over nvx
    difference: float  # largest between the weights of the two backends; 0.0 is bitwise equal
    allowed: float = 0.0

    def verdict(self):
        if self.difference == 0.0:
            return "the same, bit for bit"
        same = self.difference <= self.allowed
        return f"{'the same but for rounding, within' if same else 'DIFFER by up to'} {self.difference:.3g}"


def largest_difference(a, b):
    if all(torch.equal(a[name], b[name]) for name in a):
        return 0.0
    gap = max((a[name].double() - b[name].double()).abs().max().item() for name in a)
    return gap if gap > 0.0 else float("nan")  # unequal without a numeric difference: a NaN


def train(strategy, groups, steps, warmup, bar):
    trainers = {name: Trainer(strategy, group) for name, group in groups.items()}
    done = 0
    while done < warmup + steps:
        turn = min(TURN, warmup + steps - done)
        order = list(trainers) if (done // TURN) % 2 == 0 else list(trainers)[::-1]
        for name in order:
            for _ in range(turn):
                trainers[name].step()
            bar.advance(turn, f"{strategy} over {name}")
        done += turn
    millis = {name: 1e3 * statistics.median(t.times[warmup:]) for name, t in trainers.items()}
    nvx_losses = trainers["nvx"].losses
    weights = {name: t.weights() for name, t in trainers.items()}
    allowed = ROUNDING if dist.get_world_size() > 2 else 0.0
    return Row(strategy, millis, (nvx_losses[0], nvx_losses[-1]), largest_difference(*weights.values()), allowed)


def table(rows, steps):
    lines = [f"{'':8}{'nvx':>12}{'gloo':>12}{'nvx/gloo':>11}{'loss over nvx':>18}   weights after {steps} steps"]
    for row in rows:
        ratio = row.millis["nvx"] / row.millis["gloo"]
        lines.append(
            f"{row.strategy:8}{row.millis['nvx']:>9.1f} ms{row.millis['gloo']:>9.1f} ms{ratio:>11.2f}"
            f"{row.losses[0]:>10.3f} ->{row.losses[1]:>5.2f}   {row.verdict()}"
        )
    return "\n".join(lines)


def run_rank(rank, ranks, rendezvous, steps, warmup, threads):
    torch.set_num_threads(threads)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("nvx", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=limit)
    groups = {"nvx": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=limit)}
    bar = Bar(len(STRATEGIES) * len(BACKENDS) * (steps + warmup))
    rows = [train(strategy, groups, steps, warmup, bar) for strategy in STRATEGIES]
    if rank == 0:
        print(f"\nMedian step on rank 0, {ranks} ranks, {threads} thread(s) each:\n\n{table(rows, steps + warmup)}\n")
    dist.barrier()  # over nvx: the table is printed, and gloo's threads have released their tensors
    dist.destroy_process_group()
    if not all(row.difference <= row.allowed for row in rows):  # one may be a NaN
        sys.exit(1)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="nvx demo", description="Trains a small model over nvx and gloo in turns.")
    parser.add_argument("--steps", type=above(1), default=32, help="timed steps for each row and backend (default 32)")
    parser.add_argument("--warmup", type=above(0), default=4, help="steps before the timed ones (default 4)")
    parser.add_argument("-n", "--ranks", type=above(2), default=2, help="processes (default 2)")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    cores = nvx._load().processor()["cores"]
    nvx.stand_in.serve_none()
    threads = max(1, cores // options.ranks)
    print(
        f"nvx {nvx.__version__}, torch {torch.__version__}: training an MLP of 18M parameters, batch {BATCH} a rank, "
        f"with {' and '.join(STRATEGIES)} on {options.ranks} CPU ranks over {' and '.join(BACKENDS)} in turns",
        flush=True,
    )
    with interrupts.interruptible(), tempfile.TemporaryDirectory(prefix="nvx-demo-") as folder:
        work = (options.ranks, os.path.join(folder, "rendezvous"), options.steps, options.warmup, threads)
        try:
            torch.multiprocessing.spawn(run_rank, args=work, nprocs=options.ranks, daemon=True)
        except torch.multiprocessing.ProcessExitedException as ended:
            print(f"nvx demo: {'the weights differ' if ended.exit_code == 1 else ended}", file=sys.stderr)
            return 1
        except torch.multiprocessing.ProcessRaisedException as raised:
            print(f"nvx demo: a rank failed\n{raised}", file=sys.stderr)
            return 2
    return 0
