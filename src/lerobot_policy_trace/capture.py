"""CUDA graphs: programs of one shape, launched once instead of kernel by kernel. What is captured are pure functions of
tensors, which tests run eagerly on a CPU. Not run on CUDA since de7fadf.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lerobot_policy_trace.episodes import EpisodeBatch
from trace_errors import UsageError
from trace_memory.graphs import GraphedScans
from trace_memory.memory import Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.modeling_trace import MemoryPolicy, TraceActPolicy

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


class FlatACT(nn.Module):
    """ACT's network as a function of tensors to a tuple of tensors: pad, actions, states, maps, then a readout's parts."""

    def __init__(self, policy: "TraceActPolicy"):
        super().__init__()
        self.policy, self.names, self.cameras = policy, policy.measured, len(policy.config.image_features)

    def given(self, maps: Any, inputs: Any, readout: Any, actions: Tensor, pad: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a call."""
        return (pad, actions, *(inputs[name] for name in self.names), *maps, *(() if readout is None else readout[:5]))

    def forward(self, pad: Tensor, actions: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Predicted actions; with the VAE mean and log variance too."""
        inputs, rest = dict(zip(self.names, more, strict=False)), more[len(self.names) :]
        readout = Readout(*rest[self.cameras :]) if len(rest) > self.cameras else None  # type: ignore[arg-type]
        made, (mean, spread) = self.policy.network(list(rest[: self.cameras]), inputs, readout, actions, pad)
        return (made,) if mean is None or spread is None else (made, mean, spread)


def graphed(module: nn.Module, example: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The module as CUDA graphs, forward and back, for tensors like the example. Weights are cast inside them: what autocast
    has cast before belongs to no graph, and would be neither renewed nor given gradients.
    """
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
        run: Any = torch.cuda.make_graphed_callables(module, example, allow_unused_input=True)

    def call(*given: Tensor | None) -> Any:
        there = [x for x in given if x is not None]  # a policy without a memory has no readout
        for number, (x, like) in enumerate(zip(there, example, strict=True)):
            if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
                came, wanted = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x, like))
                raise UsageError(f"input {number} of a captured network: got {came}, expected {wanted}")
        return run(*there)

    return call


def captured(policy: "MemoryPolicy", batch: EpisodeBatch, lengths: Sequence[int], *, network: bool) -> Programs:
    """The memory's scan, for batches of these lengths, and the policy's network, for batches like this one."""
    head, scan, run = policy.memory_head, None, None
    if head is not None and batch.memory is not None:
        scan = GraphedScans(head.memory, len(batch.memory.written), lengths)
    if network:
        module, example = policy.flat_network(batch)
        call = graphed(module, tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in example))
        run = _as_act(module, call) if isinstance(module, FlatACT) else call
    return Programs(scan, run)


def _as_act(module: FlatACT, call: Callable[..., Any]) -> Callable[..., Any]:
    def network(*given: Any) -> Any:
        actions, *latent = call(*module.given(*given))
        return actions, tuple(latent) if latent else (None, None)

    return network
