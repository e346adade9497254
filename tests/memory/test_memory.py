"""What holds of every memory: scan is folded step, causal, padding-proof, row by row; and what it refuses."""

import math
from dataclasses import replace

import jaxtyping
import pytest
import torch

from trace_errors import ObservationError, UsageError
from trace_memory.config import MemoryConfig, PaperOptions, build
from trace_memory.memory import Memory, MemoryState
from trace_memory.registry import METHODS
from trace_memory.trace import DeployedMemory, deployed

B, T, C, D = 3, 40, 10, 3
SMALL = MemoryConfig(channels=D, content=C, width=16, hidden=16)
PAPER = replace(SMALL, name="paper")
VARIANTS = {name: replace(SMALL, name=name) for name in METHODS} | {
    "velocities": replace(SMALL, velocity_channels=(0,)),
    "events-clock-signature, map": replace(SMALL, name="events-clock-signature", content=4, map=(1, 3, 1, 2), plain=2),
    "events, map": replace(SMALL, name="events", content=4, map=(1, 3, 1, 2), plain=2),
    "paper, anchor": replace(PAPER, paper=PaperOptions(depth=2, anchor=True)),
    "paper, log-signature": replace(PAPER, paper=PaperOptions(slots=3, log_signature=True, tau=0.6, identity=0.3)),
}


def make(config: MemoryConfig, dtype=torch.float64) -> Memory:
    torch.manual_seed(0)
    return build(config).to(dtype).eval()


def data(dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    contents = torch.randn(B, T, C, generator=generator, dtype=dtype)
    path = torch.randn(B, T, D, generator=generator, dtype=dtype).cumsum(1) * 0.3
    valid = torch.rand(B, T, generator=generator) > 0.3
    return contents, path, valid


def tensors(readout) -> list[torch.Tensor]:
    more = (readout.counts, readout.points)  # the prior is of a scan, not of a step
    return [*readout[:5], *(readout.routing or ()), *(x for x in more if x is not None)]


@pytest.fixture(params=VARIANTS)
def config(request):
    return VARIANTS[request.param]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_scan_is_folded_step(config, dtype, tolerance):
    memory = make(config, dtype)
    contents, path, _ = data(dtype)
    final, readouts = memory.scan(contents, path)
    state = memory.init(B)
    for t in range(T):
        state, readout = memory.step(state, contents[:, t], path[:, t])
        for a, b in zip(tensors(readout), tensors(readouts.at(t)), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert (state.steps == final.steps).all()
    assert state.tensors.keys() == final.tensors.keys() == memory.shapes.keys()
    for name in state.tensors:
        torch.testing.assert_close(state.tensors[name], final.tensors[name], rtol=tolerance, atol=tolerance)


def test_a_scan_goes_on_from_a_state(config):
    memory = make(config)
    contents, path, valid = data()
    whole, readouts = memory.scan(contents, path, valid)
    half, first = memory.scan(contents[:, :17], path[:, :17], valid[:, :17])
    rest, second = memory.scan(contents[:, 17:], path[:, 17:], valid[:, 17:], half)
    for a, b, c in zip(tensors(first), tensors(second), tensors(readouts), strict=True):
        torch.testing.assert_close(torch.cat([a, b], 1)[valid], c[valid], rtol=1e-10, atol=1e-10)
    for name in whole.tensors:
        torch.testing.assert_close(rest.tensors[name], whole.tensors[name], rtol=1e-10, atol=1e-10)


def test_the_future_never_changes_the_past(config):
    memory = make(config)
    contents, path, _ = data()
    other_contents, other_path, _ = data(seed=2)
    cut = 23
    mixed = [torch.cat([a[:, :cut], b[:, cut:]], 1) for a, b in ((contents, other_contents), (path, other_path))]
    for a, b in zip(tensors(memory.scan(contents, path)[1]), tensors(memory.scan(*mixed)[1]), strict=True):
        torch.testing.assert_close(a[:, :cut], b[:, :cut], rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing_and_rows_are_independent(config):
    """Each row equals its own valid steps scanned alone, even with NaN at the padding."""
    memory = make(config)
    contents, path, valid = data()
    junk = torch.where(valid[..., None], 0.0, math.nan)
    final, readouts = memory.scan(contents + junk, path + junk, valid)
    for row in range(B):
        keep = valid[row]
        alone, read = memory.scan(contents[row, keep][None], path[row, keep][None])
        assert alone.steps[0] == final.steps[row]
        for name in final.tensors:
            torch.testing.assert_close(alone.tensors[name][0], final.tensors[name][row], rtol=1e-10, atol=1e-10)
        for a, b in zip(tensors(read), tensors(readouts), strict=True):
            torch.testing.assert_close(a[0], b[row, keep], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["trace", "unrouted", "mean-read", "no-delta"])
def test_a_robot_at_rest_writes_nothing(name):
    """However long it stands and whatever it sees meanwhile, its slots are the same: nobody can count by them. In the
    paper's form they are not.
    """
    contents, path, _ = data()
    again = torch.ones(T, dtype=torch.long)
    again[7], again[20] = 6, 30
    index = torch.arange(T).repeat_interleave(again)
    began = torch.cat([torch.ones(1, dtype=torch.bool), index[1:] != index[:-1]])
    meanwhile = torch.where(began[:, None], contents[:, index], torch.randn(B, len(index), C, dtype=torch.float64))
    for kind in (name, "paper"):
        memory = make(replace(SMALL, name=kind))
        memory.normaliser.fit(list(path), memory.signature)
        straight, rested = memory.scan(contents, path)[1], memory.scan(meanwhile, path[:, index])[1]
        apart = (rested.slots - straight.slots[:, index]).abs().max()
        assert (apart < 1e-12) == (kind != "paper")
        if kind != "paper":
            assert (rested.routing.beta[:, ~began] == 0).all()
            torch.testing.assert_close(rested.z[:, began][:, 21:], straight.z[:, 21:])


def test_writes_are_due_to_arc_length_not_to_steps():
    """A path sampled four times as finely is written about as often; in the paper's form four times as often."""
    contents, path, _ = data()
    fine = torch.nn.functional.interpolate(path.mT, scale_factor=4, mode="linear", align_corners=True).mT
    written = {}
    for name in ("trace", "paper"):
        memory = make(replace(SMALL, name=name))
        memory.normaliser.fit(list(0.3 * path), memory.signature)
        written[name] = [float(memory.scan(c, p)[1].routing.beta.sum()) for c, p in (
            (contents, 0.05 * path), (contents.repeat_interleave(4, 1), 0.05 * fine))]  # fmt: skip
    assert written["trace"][1] / written["trace"][0] < 1.5
    assert written["paper"][1] / written["paper"][0] > 3


def test_rows_reset_one_by_one(config):
    memory = make(config)
    contents, path, _ = data()
    state, _ = memory.scan(contents, path)
    reset = memory.reset(state, torch.tensor([False, True, False]))
    after, _ = memory.scan(contents[:, :9], path[:, :9], state=reset)
    on, _ = memory.scan(contents[:, :9], path[:, :9], state=state)
    fresh, _ = memory.scan(contents[:, :9], path[:, :9])
    for row, expected in enumerate((on, fresh, on)):
        assert after.steps[row] == expected.steps[row]
        for name in after.tensors:
            torch.testing.assert_close(after.tensors[name][row], expected.tensors[name][row], rtol=1e-12, atol=1e-12)


def test_budget_scan_of_every_frame_is_the_scan(config):
    memory = make(config)
    contents, path, _ = data()
    at = torch.arange(T).expand(B, T)
    for a, b in zip(tensors(memory.scan_at(contents, path, at)), tensors(memory.scan(contents, path)[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_budget_scan_keys_by_the_whole_path_and_writes_only_the_chosen(config):
    """L « T, with holes: keys equal the full scan's at those frames; writes happen there only."""
    memory = make(config)
    generator = torch.Generator().manual_seed(3)
    contents = torch.randn(B, 4, C, generator=generator, dtype=torch.float64)
    path = torch.randn(B, 60, D, generator=generator, dtype=torch.float64).cumsum(1) * 0.3
    at = torch.tensor([[0, 7, 30, 59], [0, 0, 12, 13], [0, 20, 40, 58]])
    valid = torch.tensor([[True] * 4, [False, True, True, True], [True, False, True, True]])
    readouts = memory.scan_at(contents, path, at, valid)
    everything = memory.scan(torch.zeros(B, 60, C).double(), path)[1]
    where = at[..., None].expand(-1, -1, memory.width)
    for mine, full in ((readouts.g, everything.g), (readouts.dg, everything.dg)):
        if "anchor" not in memory.shapes:
            torch.testing.assert_close(mine, full.gather(1, where), rtol=1e-9, atol=1e-9)
    junk = torch.where(valid[..., None], contents, math.nan)
    for a, b in zip(tensors(memory.scan_at(junk, path, at, valid)), tensors(readouts), strict=True):
        assert torch.equal(a[valid], b[valid])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_and_half_contents_change_nothing(config, half):
    memory = make(config, torch.float32)
    contents, path, _ = data(torch.float32)
    contents = contents.to(half)
    expected = memory.scan(contents.float(), path)[1]
    with torch.autocast("cpu", dtype=half):
        found = memory.scan(contents, path)[1]
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(a, b)


def test_gradients_reach_the_first_content(config):
    """A readout at the end depends on the first frame, for every memory that remembers (window and rows permitting)."""
    memory = make(config)
    contents, path, _ = data()
    contents.requires_grad_()
    _, readouts = memory.scan(contents[:, :8], path[:, :8])
    # not the plain sum, which is constant after a layer norm; the second term only so that there always is a graph
    last = (readouts.z[:, -1] * torch.linspace(-1, 1, memory.width)).sum() + 0 * contents.sum()
    (grad,) = torch.autograd.grad(last, contents)
    remembers = config.name not in {"none", "current", "signature-only"}
    assert bool((grad[:, 0] != 0).any()) == remembers


def test_gradients_of_a_scan_are_those_of_folded_steps(config):
    """Of every weight and of the contents."""
    memory = make(config)
    contents, path, _ = data()
    contents, path = contents[:, :9].requires_grad_(), path[:, :9]
    wanted = [contents, *(p for p in memory.parameters())]

    def gradients(readouts):
        loss = sum((x * torch.linspace(-1, 1, x.shape[-1])).sum() for r in readouts for x in r[:4] if x.numel())
        return torch.autograd.grad(loss + 0 * contents.sum(), wanted, retain_graph=True, allow_unused=True)

    state, folded = memory.init(B), []
    for t in range(9):
        state, readout = memory.step(state, contents[:, t], path[:, t])
        folded.append(readout)
    for a, b in zip(gradients([memory.scan(contents, path)[1]]), gradients(folded), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_a_deployed_memory_computes_the_same(config):
    """Step, scan and budget scan; only slot memories are arranged anew."""
    memory = make(config)
    arranged = deployed(memory)
    assert isinstance(arranged, DeployedMemory) == hasattr(memory, "slots")
    assert arranged.shapes == memory.shapes
    contents, path, valid = data()
    (one, a), (other, b) = (m.scan(contents, path, valid) for m in (memory, arranged))
    (_, c), (_, d) = (m.step(state, contents[:, 0], path[:, 0]) for m, state in ((memory, one), (arranged, other)))
    at = torch.arange(4).expand(B, 4)
    e, f = (m.scan_at(contents[:, :4], path, at) for m in (memory, arranged))
    pairs = [(tensors(a), tensors(b)), (tensors(c), tensors(d)), (tensors(e), tensors(f))]
    for mine, others in (*pairs, (one.tensors.values(), other.tensors.values())):
        for x, y in zip(mine, others, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


BAD = {
    "NaN state": ("robot_state: has a NaN", lambda c, p: (c, p * math.nan)),
    "infinite state": ("robot_state: has a NaN or infinite", lambda c, p: (c, p / 0)),
    "NaN content": ("content: has a NaN", lambda c, p: (c * math.nan, p)),
    "channels": (r"robot_state: shape \(3, 4\), expected \(B, 3\)", lambda c, p: (c, torch.cat([p, p[:, :1]], 1))),
    "content width": (r"content: shape \(3, 9\), expected \(B, 10\)", lambda c, p: (c[:, :9], p)),
    "rows": ("content: 2 rows, expected the state's 3", lambda c, p: (c[:2], p[:2])),
    "no rows": (r"content: shape \(0, 10\)", lambda c, p: (c[:0], p[:0])),
    "integers": ("content: dtype torch.int64, expected the memory's torch.float64", lambda c, p: (c.long(), p)),
    "content dtype": ("content: dtype torch.float32, expected the memory's torch.float64", lambda c, p: (c.float(), p)),
    "dtype": ("robot_state: dtype torch.float32, expected the memory's torch.float64", lambda c, p: (c, p.float())),
    "half states": ("robot_state: dtype torch.bfloat16", lambda c, p: (c, p.bfloat16())),
    "device": ("content: on meta, expected the memory's device cpu", lambda c, p: (c.to("meta"), p)),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_leaves_the_state(what):
    message, spoil = BAD[what]
    memory = make(SMALL)
    contents, path, _ = data()
    state, _ = memory.scan(contents, path)
    copy = MemoryState(state.steps.clone(), {n: c.clone() for n, c in state.tensors.items()})
    with pytest.raises(ObservationError, match=message):
        memory.step(state, *spoil(contents[:, 0], path[:, 0]))
    assert torch.equal(state.steps, copy.steps)
    assert all(torch.equal(state.tensors[n], copy.tensors[n]) for n in copy.tensors)


def test_bad_scans_are_named():
    memory = make(SMALL)
    contents, path, valid = data()
    for message, arguments in (
        (r"content: shape \(3, 0, 10\).*no size zero", (contents[:, :0], path[:, :0])),
        ("valid: .* expected bool", (contents, path, valid.float())),
        (r"robot_state: \(3, 39\) rows and steps, expected content's \(3, 40\)", (contents, path[:, 1:])),
        (r"valid: \(3, 39\)", (contents, path, valid[:, 1:])),
        ("state: tensors", (contents, path, valid, make(replace(SMALL, name="gru")).init(B))),
    ):
        with pytest.raises(ObservationError, match=message):
            memory.scan(*arguments)
    with pytest.raises(ObservationError, match=f"at: from 0 to {T}, expected 0 to {T - 1}"):
        memory.scan_at(contents[:, :2], path, torch.tensor([[0, T]] * B))
    with pytest.raises(ObservationError, match=r"at: .*float32"):
        memory.scan_at(contents[:, :2], path, torch.zeros(B, 2))
    with pytest.raises(
        ObservationError, match="robot_state: has a NaN"
    ):  # padding of contents does not excuse the path
        memory.scan_at(
            contents, path + torch.where(valid[..., None], 0.0, math.nan), torch.arange(T).expand(B, T), valid
        )
    with pytest.raises(ObservationError, match=r"memory: parameters are torch\.bfloat16"):
        make(SMALL, torch.bfloat16).scan(contents.bfloat16(), path.bfloat16())
    state = memory.init(B)
    short = MemoryState(state.steps, state.tensors | {"slots": state.tensors["slots"][:1]})
    with pytest.raises(ObservationError, match=r"state\.slots: 1 rows"):
        memory.scan(contents, path, state=short)
    with pytest.raises(ObservationError, match="batch: 0 rows"):
        memory.init(0)
    with pytest.raises(ObservationError, match="rows: "):
        memory.reset(memory.init(B), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "transfomer"}, "memory name: .*did you mean 'transformer'"),
        ({"name": "xyz"}, "memory name: 'xyz' is not known; expected one of none, trace, paper"),
        ({"channels": 0}, "memory channels: 0, expected a whole number, 1 or more"),
        ({"content": 2.5}, "memory content: 2.5"),
        ({"width": True}, "memory width: True"),
        ({"hidden": "64"}, "memory hidden: '64'"),
        ({"dropout": 1.0}, "memory dropout: 1.0, expected less than 1"),
        ({"dropout": -0.1}, "memory dropout: -0.1, expected a number of 0 or more"),
        ({"velocity_channels": (99,)}, r"memory velocity_channels: \(99,\), expected .* 0 to 2"),
        ({"velocity_channels": (True,)}, "memory velocity_channels"),
        ({"paper": PaperOptions(slots=3)}, "memory paper: has options for memory 'trace', expected them with paper"),
        ({"paper": {"slots": 3}}, "memory paper: .*expected PaperOptions"),
    ],
)
def test_impossible_configurations_are_named(change, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would refuse wrong types itself, in tests
    with pytest.raises(UsageError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "memory paper.slots: 0, expected a whole number, 1 or more"),
        ({"depth": 2.0}, "memory paper.depth: 2.0"),
        ({"tau": 0.0}, "memory paper.tau: 0.0, expected a positive number"),
        ({"tau": math.nan}, "memory paper.tau: nan"),
        ({"identity": -1.0}, "memory paper.identity: -1.0, expected a number of 0 or more"),
        ({"balance": math.inf}, "memory paper.balance: inf"),
        ({"log_signature": "yes"}, "memory paper.log_signature: 'yes', expected true or false"),
        ({"anchor": 1}, "memory paper.anchor: 1"),
    ],
)
def test_impossible_options_of_the_papers_form_are_named(change, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UsageError, match=message):
        PaperOptions(**change)


def test_a_memory_without_parameters_knows_its_device():
    assert make(replace(SMALL, name="none")).to("meta").init(2).steps.device.type == "meta"


def test_a_base_that_drives_steadily_is_not_at_rest():
    """Where a channel is a velocity, the write rate goes by its value: steady driving is movement, standing is not."""
    contents, path, _ = data()
    steady = torch.zeros_like(path)
    steady[:, : T // 2, 0] = 0.3  # drives, then stands; nothing else moves
    for channels, writes in (((), False), ((0,), True)):
        memory = make(replace(SMALL, velocity_channels=channels))
        memory.normaliser.fit([*path, *steady], memory.signature)
        beta = memory.scan(contents, steady)[1].routing.beta
        assert bool(beta[:, 1 : T // 2].sum() > 0.1) == writes
        assert float(beta[:, T // 2 + 1 :].sum()) < 1e-9
