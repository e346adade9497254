"""What only a GPU can show; skipped where there is none (CI)."""

import math

import pytest
import torch

from lerobot_policy_trace.capture import GraphedScans
from trace_errors import UsageError
from trace_memory.config import MemoryConfig, build
from trace_memory.signature import LogSignature, Signature

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def walk(*shape: int) -> torch.Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cumsum(1)


@pytest.mark.parametrize(("kind", "fade"), [(Signature, math.inf), (Signature, 5.0), (LogSignature, math.inf)])
def test_a_captured_step_streams_the_signature(kind, fade):
    signature, path = kind(17, 3, fade), walk(2, 30, 17)
    _, expected, _ = signature.stream(path)
    state, _, _ = signature.step(signature.init(2, device="cuda"), path[:, 0].cuda())
    held, point = type(state)(*(x.clone() for x in state)), path[:, 0].cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new, xi, _ = signature.step(held, point)
        for old, value in zip(held, new, strict=True):
            old.copy_(value)
    for t in range(1, 30):
        point.copy_(path[:, t])
        graph.replay()
    torch.testing.assert_close(xi.cpu(), expected[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "trace"])
def test_a_captured_scan_equals_the_eager_one(name):
    """On fresh inputs and a mask, all fields and the gradients of the contents and of a weight used at every step."""
    torch.manual_seed(0)
    memory = build(MemoryConfig(name=name)).cuda().eval()
    captured = GraphedScans(memory, walk(4, 16, 17).cuda(), [16])
    for _ in range(2):
        contents = torch.randn(4, 16, 1024, device="cuda", requires_grad=True)
        path, valid = torch.randn(4, 16, 17, device="cuda").cumsum(1), torch.rand(4, 16, device="cuda") > 0.2
        found = captured(contents, path, valid)
        wanted = (contents, memory.slots.phi_m.last.weight)
        grads = torch.autograd.grad(found.z.square().sum(), wanted)
        eager = memory.scan(contents, path, valid)[1]
        expected = torch.autograd.grad(eager.z.square().sum(), wanted)
        for a, b in zip((*found[:5], *found.routing), (*eager[:5], *eager.routing), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(grads, expected, strict=True):  # sums in another order: small ones are all rounding
            assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6
    memory.train()
    with pytest.raises(UsageError, match="training is True, expected False"):
        captured(contents, path, valid)
