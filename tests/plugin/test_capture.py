"""What is captured in CUDA graphs, run eagerly: `torch.cuda.make_graphed_callables` gives the function back as it is. The
policies' networks are in test_policies.py and tests/lab/test_features.py, graphs themselves in tests/memory/test_cuda.py.
"""

import pytest
import torch

from lerobot_policy_trace.capture import GraphedScans, graphed
from trace_errors import UsageError
from trace_memory.config import MemoryConfig, build

ROWS, LENGTHS = 3, (5, 8)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, example, **_: module)


def inputs(length: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    contents, path = (torch.randn(ROWS, length, n, generator=draw) for n in (10, 3))
    return [contents.requires_grad_(), path.cumsum(1), torch.rand(ROWS, length, generator=draw) > 0.2]


@pytest.fixture(params=["paper", "trace", "gru"])
def memory(request):
    torch.manual_seed(0)
    return build(MemoryConfig(name=request.param, channels=3, content=10, width=16, hidden=16)).eval()


def test_a_flat_scan_is_the_memorys_own(memory):
    """All fields, and gradients of the contents and of every weight."""
    scans = GraphedScans(memory, inputs(5)[1], LENGTHS)
    for length in LENGTHS:
        given, found = inputs(length), []
        for readout in (scans(*given), memory.scan(*given)[1]):
            wanted = [given[0], *memory.parameters()]
            grads = torch.autograd.grad(readout.z.square().sum(), wanted, allow_unused=True)
            found.append([*readout[:5], *(readout.routing or ()), *(x for x in grads if x is not None)])
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)


def test_a_captured_function_is_called_as_it_was_captured(memory):
    scans, (contents, path, valid) = GraphedScans(memory, inputs(5)[1], LENGTHS), inputs(5)
    with pytest.raises(UsageError, match="contents: 4 steps, expected one of 5, 8"):
        scans(contents[:, :4], path[:, :4], valid[:, :4])
    with pytest.raises(UsageError, match=r"input 1 of a captured FlatScan: got \(3, 5, 2\) .*, expected \(3, 5, 3\)"):
        scans(contents, path[..., :2], valid)
    assert torch.equal(scans(contents.bfloat16(), path, valid).z, scans(contents.bfloat16().float(), path, valid).z)
    memory.train()
    with pytest.raises(UsageError, match=r"FlatScan.memory: training is True, expected False as when captured"):
        scans(contents, path, valid)


def test_what_is_not_there_is_left_out():
    module = torch.nn.Identity()
    assert graphed(module, (torch.zeros(2),))(torch.ones(2), None).sum() == 2
