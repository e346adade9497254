"""CUDA graphs: programs of one shape, launched once instead of kernel by kernel. All capture is done here, and what is
captured are pure functions of tensors, which tests run eagerly on a CPU. This file was not run on CUDA since 83979fb.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lerobot_policy_trace.episodes import EpisodeBatch
from lerobot_policy_trace.networks import FlatACT, FlatScan
from trace_errors import UsageError
from trace_memory.memory import Memory, Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.modeling_trace import MemoryPolicy

WARM_UP = 3  # calls before a graph is captured


class Programs(NamedTuple):
    """What stands for a policy's own functions in training; None: the policy's own."""

    scan: Callable[[Tensor, Tensor, Tensor], Readout] | None = None
    network: Callable[..., Any] | None = None


def replayed(program: Callable[[], Any]) -> Callable[[], None]:
    """A program on buffers that never move, as one CUDA graph of the current device."""
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


def graphed(module: nn.Module, example: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The module as CUDA graphs, forward and back, for tensors like the example. Make it while no autograd graph through the
    same weights is alive; it writes into the same tensors each time, so one forward and its backward come before the next.
    Weights are cast inside it: what autocast has cast before belongs to no graph, and would be neither renewed nor given
    gradients.
    """
    kind, modes = type(module).__name__, [(name, each, each.training) for name, each in module.named_modules()]
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
        run: Any = torch.cuda.make_graphed_callables(module, example, allow_unused_input=True)

    def call(*given: Tensor | None) -> Any:
        for name, each, training in modes:
            if each.training != training:
                raise UsageError(f"{kind}.{name}: training is {each.training}, expected {training} as when captured")
        there = [x for x in given if x is not None]  # a policy without a memory has no readout
        for number, (x, like) in enumerate(zip(there, example, strict=True)):
            if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
                came, wanted = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x, like))
                raise UsageError(f"input {number} of a captured {kind}: got {came}, expected {wanted}")
        return run(*there)

    return call


class GraphedScans:
    """A captured scan for each of a few lengths, with as many rows as an example of a path has."""

    def __init__(self, memory: Memory, path: Tensor, lengths: Sequence[int]):
        self.made: dict[int, Callable[..., Any]] = {}
        for length in lengths:
            contents, like = (path.new_empty(len(path), length, n).normal_() for n in (memory.content, path.shape[-1]))
            valid = torch.ones(like.shape[:2], dtype=torch.bool, device=path.device)
            with torch.autocast("cuda", enabled=False):  # a memory is not cast
                self.made[length] = graphed(FlatScan(memory), (contents.requires_grad_(), like, valid))

    def __call__(self, contents: Tensor, path: Tensor, valid: Tensor) -> Readout:
        """As `memory.scan(contents, path, valid)[1]`, but NaN is not looked for; contents may be of half precision."""
        if (length := contents.shape[1]) not in self.made:
            raise UsageError(f"contents: {length} steps, expected one of {', '.join(map(str, self.made))}")
        return FlatScan.readout(self.made[length](contents.to(path.dtype), path, valid))


def captured(policy: "MemoryPolicy", batch: EpisodeBatch, lengths: Sequence[int], *, network: bool) -> Programs:
    """The memory's scan, for batches of these lengths, and the policy's network, for batches like this one."""
    head, scan, run = policy.memory_head, None, None
    if head is not None and batch.memory is not None:
        scan = GraphedScans(head.memory, batch.memory.path, lengths)
    if network:
        module, example = policy.flat_network(batch)
        call = graphed(module, tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in example))
        run = module.as_network(call) if isinstance(module, FlatACT) else call
    return Programs(scan, run)
