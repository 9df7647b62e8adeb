"""A rank of a case, and how its results are compared."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FIGURES = "NVX_TEST_FIGURES"  # rank 0 appends its figures to this file, a JSON object a line


class Rank:
    """One rank in a default group over nvx. `reported`: the destination of rank 0's figures, beside the file."""

    def __init__(self, device: torch.device, reported: list[dict[str, Any]] | None = None) -> None:
        self.number, self.world, self.device = dist.get_rank(), dist.get_world_size(), device
        self.reported = [] if reported is None else reported
        self.beside = dist.new_group(backend="gloo")
        self.serves_gloo = device.type in ("cpu", "cuda")  # gloo serves these tensors

    def report(self, **fields: Any) -> None:
        """Reports a figure from rank 0."""
        if self.number != 0:
            return
        self.reported.append(fields)
        if file := os.environ.get(FIGURES):
            with open(file, "a") as out:
                out.write(json.dumps(fields) + "\n")

    def all_gather(self, mine: Any) -> list[Any]:
        """Gathers each rank's value over a group that is not under test. The value must be JSON; a tuple arrives as a
        list. torch's own exchange of objects needs numpy."""
        encoded = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=self.beside)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: encoded.numel()] = encoded
        every = [torch.zeros_like(padded) for _ in range(self.world)]
        dist.all_gather(every, padded, group=self.beside)
        return [json.loads(bytes_of(one)[: int(size)]) for one, size in zip(every, sizes, strict=True)]

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def agree(self, tensors: list[torch.Tensor], what: str) -> None:
        """Asserts that every rank has the same bits."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(bytes_of(tensor))
        found = self.all_gather(digest.hexdigest())
        if len(set(found)) != 1:
            raise AssertionError(f"{what}: the ranks do not have the same bits: {[one[:8] for one in found]}")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes as they lie in memory, in order."""
    host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""


Tensors = list[torch.Tensor]


def close(got: Tensors, want: Tensors, what: str, *, exact: bool = False, near: float = 1) -> None:
    """Asserts equality bit for bit, or within the error of another order of summation."""
    if len(got) != len(want):
        raise AssertionError(f"{what}: {len(got)} tensors, want {len(want)}")
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        rules = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5 * near, "atol": 1e-6 * near}
        torch.testing.assert_close(
            a.detach().cpu(), b.detach().cpu(), msg=lambda text, n=number: f"{what}, tensor {n}: {text}", **rules
        )


Cases = dict[str, Callable[[Rank], None]]
