"""What a policy becomes for deployment: a frozen copy with its weights arranged for speed (`frozen`), number formats
(`computing`), CUDA graphs (`captured`). Which steps a robot takes with it is in `control`.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lerobot_policy_trace.backbone import bake

if TYPE_CHECKING:
    from lerobot_policy_trace.remembering import Remembering

PRECISIONS = {
    "float32": "everything; what a CPU does if not told otherwise",
    "tf32": "GPU: the policy's convolutions and matrix products in TF32; what a GPU does if not told otherwise",
    "bf16": "the policy in bfloat16, the memory in float32",
    "fp16": "CPU: the memory's weights kept in float16, computed in float32",
}
WARM_UP = 3  # calls before a graph is captured
STILL = 0.05  # less is no movement: standard deviations of ACT's actions, halves of the range of Diffusion Policy's


def choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row by row one or the other."""
    return torch.where(rows.view(-1, *[1] * (max(yes.ndim, no.ndim) - 1)), yes, no)


def lasting(chunk: Tensor, rest: int | None) -> Tensor:
    """(rows,): how many actions of (rows, n, d) chunks are carried out before the next look. All of them; but where the
    first `rest` leave the robot as it is, only those: who waits looks more often than who moves.
    """
    count = chunk.new_full(chunk.shape[:1], chunk.shape[1], dtype=torch.int64)
    if rest is None:
        return count
    moved = (chunk[:, :rest] - chunk[:, :1]).abs().amax((1, 2))
    return torch.where(moved <= STILL, min(rest, chunk.shape[1]), count)


def version(policy: nn.Module) -> int:
    """A number that is another one after weights were changed in place or replaced (not after changes through `.data`)."""
    weights = (*policy.parameters(), *policy.buffers())
    return hash(tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights))


def frozen(policy: "Remembering", precision: str) -> tuple[Any, bool]:
    """A copy for deployment: no gradients, normalisations baked into convolutions, weights arranged once. And whether its
    convolutions want pictures channels last.
    """
    apart = {id(x): None for x in (policy.paths, policy.captured, policy.network, policy.control) if x is not None}
    made = copy.deepcopy(policy, apart).eval().requires_grad_(requires_grad=False)
    made.reset()
    baked = [bake(backbone) for backbone in made.backbones]
    recall = made.recall
    if recall is not None and hasattr(recall.memory, "slots"):
        with exactly():
            recall.memory.slots.settle()
    if precision == "fp16" and recall is not None:
        halve(recall)
    if precision == "bf16":
        mine = {id(x) for x in recall.modules()} if recall is not None else set()
        for module in made.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) and id(module) not in mine:
                module.to(torch.bfloat16)
    return made, any(baked)


class HalfLinear(nn.Module):
    """A linear layer whose weights are kept in float16 (FBGEMM): half the bytes to read, which is what a step on a CPU waits
    for. Products and sums are float32.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        bias = None if layer.bias is None else layer.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().contiguous(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's map."""
        made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return made


def halve(module: nn.Module) -> None:
    """Puts a `HalfLinear` in the place of every linear layer."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            module._modules[name] = HalfLinear(child)
        else:
            halve(child)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """The number format of everything computed meanwhile."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "tf32"),
            exactly(exact=precision != "tf32"),
        ):
            yield


@contextmanager
def exactly(*, exact: bool = True) -> Iterator[None]:
    """Matrix products in float32, or in TF32; a memory's are always float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not exact
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def captured(program: Callable[[], Any]) -> Callable[[], None]:
    """A program as one CUDA graph of the current device."""
    gc.collect()  # so that nothing is freed in the middle of it
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            program()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()
    return graph.replay
