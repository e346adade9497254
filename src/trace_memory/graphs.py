"""A scan captured in CUDA graphs: the same `Memory.scan`, launched once instead of kernel by kernel. For training batches of
one fixed shape; the eager scan is its reference. Run on CUDA at 83979fb.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trace_errors import ObservationError, UsageError
from trace_memory.memory import Memory, Readout, Routing


class Flat(nn.Module):
    """scan as a function of tensors to a tuple of tensors, which is what capture needs."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def forward(self, contents: Tensor, path: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """The fields of the readout."""
        _, readout = self.memory.scan(contents, path, valid)
        return (*readout[:5], *(readout.routing or ()))


def readout(flat: tuple[Tensor, ...]) -> Readout:
    """The readout of its fields."""
    slots, z, g, dg, alpha = flat[:5]
    return Readout(slots, z, g, dg, alpha, Routing(*flat[5:]) if len(flat) > 5 else None)


class GraphedScan:
    """Readouts of whole scans from zero, for batches shaped like the examples it was made with.

    Make it before, or after the end of, any eager forward through the same memory: capture fails while an autograd graph
    of the default stream is still alive. Like every captured callable it writes its readouts into the same tensors each
    time, so use one forward and its backward before the next; and it does not look for NaN.
    """

    def __init__(self, memory: Memory, contents: Tensor, path: Tensor, valid: Tensor | None = None):
        if not contents.is_cuda:
            raise UsageError(f"contents: on {contents.device}, expected a CUDA device")
        self.memory, self.training = memory, memory.training
        self.mask = torch.ones(contents.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        self.example = (contents.detach().clone(), path.detach().clone(), self.mask.clone())
        self.example[0].requires_grad_(contents.requires_grad)
        self.captured: Any = torch.cuda.make_graphed_callables(Flat(memory), self.example, allow_unused_input=True)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor | None = None) -> Readout:
        """As `memory.scan(contents, path, valid)[1]`, in the tensors of the last call."""
        if self.memory.training != self.training:
            raise UsageError(f"memory: training is {self.memory.training}, expected {self.training} as when captured")
        given = (contents, path, torch.ones_like(self.mask) if valid is None else valid)
        for name, x, like in zip(("contents", "path", "valid"), given, self.example, strict=True):
            if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
                raise ObservationError(
                    f"{name}: {tuple(x.shape)} {x.dtype} on {x.device}, expected {tuple(like.shape)} {like.dtype} "
                    f"on {like.device} as captured"
                )
        return readout(self.captured(*given))


class GraphedScans:
    """A captured scan for each of a few lengths, all with as many rows."""

    def __init__(self, memory: Memory, rows: int, lengths: Sequence[int]):
        like = memory._like
        self.made: dict[int, GraphedScan] = {}
        for length in lengths:
            contents = torch.randn(
                rows, length, memory.content, dtype=like.dtype, device=like.device, requires_grad=True
            )
            path = torch.randn(rows, length, memory.channels, dtype=like.dtype, device=like.device)
            self.made[length] = GraphedScan(memory, contents, path)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor) -> Readout:
        """As `GraphedScan`; contents may be of half precision."""
        if contents.shape[1] not in self.made:
            wanted = ", ".join(map(str, self.made))
            raise ObservationError(f"contents: {contents.shape[1]} steps, expected one of {wanted}")
        return self.made[contents.shape[1]](contents.to(path.dtype), path, valid)
