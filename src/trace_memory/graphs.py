"""A scan captured in CUDA graphs: the same `Memory.scan`, launched once instead of kernel by kernel. For training batches of
one fixed shape; the eager scan is its reference.
"""

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
    """Readouts of whole scans from zero, for batches shaped like the examples it was made with."""

    def __init__(self, memory: Memory, contents: Tensor, path: Tensor, valid: Tensor | None = None):
        if not contents.is_cuda:
            raise ValueError(f"contents: on {contents.device}, expected a CUDA device")
        self.shape = tuple(contents.shape)
        mask = torch.ones(self.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        example = (contents.detach().clone().requires_grad_(contents.requires_grad), path.detach().clone(), mask.clone())
        self.captured = torch.cuda.make_graphed_callables(_Flat(memory), example, allow_unused_input=True)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor | None = None) -> Readout:
        """As `memory.scan(contents, path, valid)[1]`."""
        if tuple(contents.shape) != self.shape:
            raise ValueError(f"contents: shape {tuple(contents.shape)}, expected the captured {self.shape}")
        mask = torch.ones(self.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        flat = self.captured(contents, path, mask)
        return Readout(*flat[:5], Routing(*flat[5:]) if len(flat) > 5 else None)
