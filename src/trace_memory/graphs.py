"""A scan captured in CUDA graphs: the same `Memory.scan`, launched once instead of kernel by kernel. For training batches of
one fixed shape; the eager scan is its reference.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trace_memory.memory import Memory, Readout, Routing


class _Flat(nn.Module):
    """scan as a function of tensors to a tuple of tensors, which is what capture needs."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def forward(self, contents: Tensor, path: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        _, readout = self.memory.scan(contents, path, valid)
        return (*readout[:5], *(readout.routing or ()))


class GraphedScan:
    """Readouts of whole scans from zero, for batches shaped like the examples it was made with.

    Make it before, or after the end of, any eager forward through the same memory: capture fails while an autograd graph
    of the default stream is still alive.
    """

    def __init__(self, memory: Memory, contents: Tensor, path: Tensor, valid: Tensor | None = None):
        if not contents.is_cuda:
            raise ValueError(f"contents: on {contents.device}, expected a CUDA device")
        self.shape = tuple(contents.shape)
        mask = torch.ones(self.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        example = (
            contents.detach().clone().requires_grad_(contents.requires_grad),
            path.detach().clone(),
            mask.clone(),
        )
        self.captured: Any = torch.cuda.make_graphed_callables(_Flat(memory), example, allow_unused_input=True)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor | None = None) -> Readout:
        """As `memory.scan(contents, path, valid)[1]`."""
        if tuple(contents.shape) != self.shape:
            raise ValueError(f"contents: shape {tuple(contents.shape)}, expected the captured {self.shape}")
        mask = torch.ones(self.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        flat = self.captured(contents, path, mask)
        slots, z, g, dg, alpha = flat[:5]
        return Readout(slots, z, g, dg, alpha, Routing(*flat[5:]) if len(flat) > 5 else None)
