"""The device of the tensors for which a test requests CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """The device of the tensors for which a test requests CUDA: the CPU, or devices that the ranks share."""

    kind: str = "cpu"
    count: int = 1

    def here(self, device):
        """`device`, or its replacement if it is a GPU's number or name."""
        import torch

        if isinstance(device, bool) or device is None:
            return device
        if isinstance(device, int):
            return self.number(device)
        if not isinstance(device, (str, torch.device)) or torch.device(device).type != "cuda":
            return device
        index = torch.device(device).index
        return torch.device(self.kind) if index is None or self.kind == "cpu" else self.number(index)

    def number(self, index: int) -> torch.device:
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, index % self.count)
