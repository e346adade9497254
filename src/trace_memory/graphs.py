"""A scan captured in CUDA graphs: the same `Memory.scan`, launched once instead of kernel by kernel, and with fewer kernels
where it is fused. For training batches of one fixed shape; the eager scan is its reference.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._triton import has_triton

from trace_memory.memory import Memory, Readout, Routing
from trace_memory.slots import Drive, Maps, Slots

LIMIT = 64  # kinds of writes that may be compiled in one process


def compiles() -> bool:
    """Whether writes can be compiled here: Triton needs a C compiler."""
    return has_triton() and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


class _Together(torch.autograd.Function):
    """A layer's bias at each of T steps, (T, ..., o). On the way back the gradients of all steps meet here, and with what
    the layer was given, (T, ..., i), make its weight's in one product.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, biases: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return biases.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient.flatten(0, -2).T @ torch.stack(ctx.given).flatten(0, -2), gradient, None


class Layer:
    """A linear map at one of many steps: it remembers what it was given and leaves its weight's gradient for later."""

    given: Tensor

    def __init__(self, weight: Tensor, bias: Tensor):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """The map."""
        self.given = x.detach()
        return F.linear(x, self.weight) + self.bias


def together(slots: Slots, drive: Drive, maps: Maps) -> Iterator[tuple[Drive, Maps]]:
    """`slots.each`, with steps whose weight gradients are computed once for all of them. Nobody may differentiate those."""
    steps = list(Slots.each(slots, drive, maps))
    first, shape = (slots.phi_m.first, slots.phi_beta.first), (len(steps), len(drive.u), slots.count, -1)
    of_slot = torch.cat([layer.weight[:, : slots.width] for layer in first])
    linear = {
        "slot": (of_slot, of_slot.new_zeros(len(of_slot))),
        "proposal": (slots.phi_m.last.weight, slots.phi_m.last.bias),
        "strength": (slots.phi_beta.last.weight, slots.phi_beta.last.bias),
    }
    given: dict[str, list[Tensor]] = {name: [] for name in linear}
    biases = [_Together.apply(w, b.expand(shape), given[name]).unbind() for name, (w, b) in linear.items()]
    weights = [w.detach() for w, _ in linear.values()]
    for (now, _), here in zip(steps, zip(*biases, strict=True), strict=True):
        layers = dict(zip(linear, map(Layer, weights, here), strict=True))
        yield now, maps._replace(**layers)
        for name, layer in layers.items():
            given[name].append(layer.given)


@contextmanager
def quick(memory: Memory, *, fuse: bool) -> Iterator[None]:
    """Meanwhile the weight gradients of the memory's slots, if it has any, are one product a scan; and a write to them is
    compiled, if `fuse` says so: small operations are joined.
    """
    slots = getattr(memory, "slots", None)
    if slots is None:
        yield
        return
    slots.__dict__["each"] = partial(together, slots)
    if fuse:
        slots.__dict__["write"] = torch.compile(slots.write, dynamic=False, fullgraph=True)
    try:
        with torch._dynamo.config.patch(recompile_limit=LIMIT):
            yield
    finally:
        del slots.__dict__["each"]
        slots.__dict__.pop("write", None)


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
    of the default stream is still alive. Like every captured callable it writes its readouts into the same tensors each
    time, so use one forward and its backward before the next; and it does not look for NaN. `fuse` takes half a minute more.
    """

    def __init__(
        self, memory: Memory, contents: Tensor, path: Tensor, valid: Tensor | None = None, *, fuse: bool = False
    ):
        if not contents.is_cuda:
            raise ValueError(f"contents: on {contents.device}, expected a CUDA device")
        self.memory, self.training = memory, memory.training
        self.mask = torch.ones(contents.shape[:2], dtype=torch.bool, device=contents.device) if valid is None else valid
        self.example = (contents.detach().clone(), path.detach().clone(), self.mask.clone())
        self.example[0].requires_grad_(contents.requires_grad)
        with quick(memory, fuse=fuse):
            self.captured: Any = torch.cuda.make_graphed_callables(_Flat(memory), self.example, allow_unused_input=True)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor | None = None) -> Readout:
        """As `memory.scan(contents, path, valid)[1]`, in the tensors of the last call."""
        if self.memory.training != self.training:
            raise ValueError(f"memory: training is {self.memory.training}, expected {self.training} as when captured")
        given = (contents, path, torch.ones_like(self.mask) if valid is None else valid)
        for name, x, like in zip(("contents", "path", "valid"), given, self.example, strict=True):
            if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
                raise ValueError(
                    f"{name}: {tuple(x.shape)} {x.dtype} on {x.device}, expected {tuple(like.shape)} {like.dtype} "
                    f"on {like.device} as captured"
                )
        flat = self.captured(*given)
        slots, z, g, dg, alpha = flat[:5]
        return Readout(slots, z, g, dg, alpha, Routing(*flat[5:]) if len(flat) > 5 else None)


class GraphedScans:
    """A captured scan for each of a few lengths, all with as many rows."""

    def __init__(self, memory: Memory, rows: int, lengths: Sequence[int], *, fuse: bool = False):
        like = memory._like
        self.made: dict[int, GraphedScan] = {}
        for length in lengths:
            contents = torch.randn(
                rows, length, memory.content, dtype=like.dtype, device=like.device, requires_grad=True
            )
            path = torch.randn(rows, length, memory.channels, dtype=like.dtype, device=like.device)
            self.made[length] = GraphedScan(memory, contents, path, fuse=fuse)

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor) -> Readout:
        """As `GraphedScan`; contents may be of half precision."""
        if contents.shape[1] not in self.made:
            raise ValueError(f"contents: {contents.shape[1]} steps, expected one of {', '.join(map(str, self.made))}")
        return self.made[contents.shape[1]](contents.to(path.dtype), path, valid)
