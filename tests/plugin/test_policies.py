"""The policies: stock where nothing is asked for, the same memory in training and deployment, rows independent."""

import copy
import inspect
import json
import runpy
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import draccus
import lerobot
import pyarrow.compute
import pyarrow.parquet
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.rollout.inference.rtc import supports_rtc_inference
from safetensors.torch import load_file, save_file

from lerobot_policy_trace import (
    EpisodeBatch,
    MemoryOptions,
    TraceActConfig,
    TraceActPolicy,
    TraceDiffusionConfig,
    TraceDiffusionPolicy,
)
from lerobot_policy_trace import session as session_module
from lerobot_policy_trace.capture import Programs
from lerobot_policy_trace.episodes import MemoryInputs
from lerobot_policy_trace.loading import load_configuration
from lerobot_policy_trace.memory_head import FORM, Content
from lerobot_policy_trace.modeling_trace import MemoryPolicy
from lerobot_policy_trace.networks import MemoryBlock, MemoryDiffusion, MemoryUnet
from lerobot_policy_trace.paths import Paths
from trace_errors import CheckpointError, DatasetError, UsageError
from trace_memory.registry import of_policies

CAMERAS = [f"observation.images.{name}" for name in ("overhead", "left_wrist", "right_wrist")]
SMALL = {
    "act": {
        "dim_model": 64, "n_heads": 4, "dim_feedforward": 64, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
        "chunk_size": 12, "n_action_steps": 4,
    },
    "diffusion": {
        "horizon": 16, "n_action_steps": 4, "down_dims": (32, 64), "crop_shape": (60, 60), "num_inference_steps": 2,
        "noise_scheduler_type": "DDIM",
    },
}  # fmt: skip
SMALL["diffusion, one encoder"] = SMALL["diffusion"] | {"use_separate_rgb_encoder_per_camera": False}
STOCK = {"act": (ACTConfig, ACTPolicy), "diffusion": (DiffusionConfig, DiffusionPolicy)}
OURS = {"act": (TraceActConfig, TraceActPolicy), "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy)}
for _table in (STOCK, OURS):
    _table["diffusion, one encoder"] = _table["diffusion"]
DOCS = Path(__file__).parents[2] / "docs"
BOTH = pytest.mark.parametrize("kind", ["act", "diffusion", "diffusion, one encoder"])
WHOLE = MemoryOptions(width=64, hidden=64, history_frames=16, history_stride=1)  # sees every frame of the first sixteen


def features(size: int) -> dict:
    pictures = {camera: PolicyFeature(FeatureType.VISUAL, (3, size, size)) for camera in CAMERAS}
    return {
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (17,)), **pictures},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (17,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }


def ours(kind: str, dataset, memory: MemoryOptions = WHOLE, dtype=torch.float32):
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=dataset)
    config = OURS[kind][0](memory=memory, **features(64), **SMALL[kind])
    torch.manual_seed(0)
    policy = make_policy(config, ds_meta=meta).to(dtype)
    if policy.memory_head is not None:
        policy.memory_head.fit(policy.paths)
    if hasattr(policy.memory_head, "adapter"):  # as after some training: what starts at zero does so no more
        for name, p in policy.named_parameters():
            if "memory_head.adapter" in name or "memory_encoder" in name:
                torch.nn.init.normal_(p, std=0.05)
    return policy.eval(), make_pre_post_processors(config, dataset_stats=meta.stats)[0], meta


def cast(batch: dict, dtype: torch.dtype) -> dict:
    return {k: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in batch.items()}


def frames(dataset, prepare, dtype, count: int, start: int = 0) -> list[dict]:
    """Observations of an episode, one a control step, as a robot loop would hand them over."""
    data = LeRobotDataset("trace_bench/cable", root=dataset)
    wanted = ("observation.state", *CAMERAS)
    return [cast(prepare({k: data[start + t][k] for k in wanted}), dtype) for t in range(count)]


def batch_at(dataset, policy, prepare, meta, indices: list[int], dtype) -> dict:
    """A training batch of the stock loader."""
    data = LeRobotDataset(meta.repo_id, root=dataset, delta_timestamps=resolve_delta_timestamps(policy.config, meta))
    return cast(prepare(torch.utils.data.default_collate([data[i] for i in indices])), dtype)


@BOTH
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_memory_online_is_the_training_scan(kind, dtype, tolerance, dataset):
    """After eleven steps, also while queued actions are executed, the memory holds what training at that frame sees."""
    policy, prepare, meta = ours(kind, dataset, dtype=dtype)
    for observation in frames(dataset, prepare, dtype, 11):
        policy.select_action(observation)
    batch = batch_at(dataset, policy, prepare, meta, [10], dtype)
    with torch.no_grad():
        maps = policy.encode_steps([policy._targets(batch)[key] for key in CAMERAS])
        seen = policy._history(batch, [x[:, -1] for x in maps], {})
    assert policy.session.state.steps.tolist() == [11]
    torch.testing.assert_close(policy.session.state.tensors["slots"], seen.slots, rtol=tolerance, atol=tolerance)
    assert policy.session.state.tensors["slots"].abs().max() > 0


@BOTH
def test_watching_acting_and_predicting_remember_the_same(kind, dataset):
    policy, prepare, _ = ours(kind, dataset)
    states = []
    for way in (policy.select_action, policy.observe, policy.predict_action_chunk):
        policy.reset()
        for observation in frames(dataset, prepare, torch.float32, 6):
            way(observation)
        states.append(policy.session.state)
    for other in states[1:]:
        torch.testing.assert_close(other.tensors, states[0].tensors)


@BOTH
def test_rows_that_end_at_different_times(kind, dataset):
    """Two rows, of which one begins anew after seven steps, act as two robots would."""
    policy, prepare, _ = ours(kind, dataset, dtype=torch.float64)
    first, second = (frames(dataset, prepare, torch.float64, 14, start) for start in (0, 60))
    noise = torch.randn(1, 16, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def act(rows: list[dict], steps: list[int]) -> torch.Tensor:
        batch = {k: torch.cat([row[k] for row in rows]) for k in rows[0] if k.startswith("observation.")}
        batch["observation.episode_step"] = torch.tensor(steps)[:, None].float()
        return policy.select_action(batch, **({"noise": noise.expand(len(rows), -1, -1)} if kind != "act" else {}))

    policy.reset()
    together = [act([first[t], second[t if t < 7 else t - 7]], [t, t if t < 7 else t - 7]) for t in range(14)]
    for row, order in ((0, list(range(14))), (1, [*range(7), *range(7)])):
        alone = []
        for t, frame in enumerate(order):
            if frame == 0:
                policy.reset()
            alone.append(act([(first, second)[row][frame]], [frame]))
            assert t < 14
        torch.testing.assert_close(torch.cat(alone), torch.stack([x[row] for x in together]), rtol=1e-9, atol=1e-9)


def joins(name: str) -> bool:
    """Whether a weight joins the memory to the policy."""
    return name.startswith("memory_head.adapter") or ".memory_encoder." in name


def without_history(kind, policy, batch: dict) -> dict:
    """A batch of ours as the stock policy gets it."""
    steps, frames = policy.config.n_obs_steps, policy.config.memory.history_frames
    keep = -1 if kind == "act" else [*range(steps - 1), steps + frames - 2]
    return {key: x[:, keep] if key.startswith("observation.") and x.ndim > 1 else x for key, x in batch.items()}


@BOTH
def test_attached_to_a_trained_policy_nothing_changes(kind, dataset):
    """Loss and sixty actions are bit-equal to the stock policy's; then it trains."""
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=dataset)
    torch.manual_seed(3)
    stock = STOCK[kind][1](STOCK[kind][0](**features(64), **SMALL[kind])).eval()
    policy = OURS[kind][1].from_stock(stock, WHOLE, dataset_meta=meta).eval()
    assert policy.config.memory == replace(WHOLE, attach="residual")
    prepare = make_pre_post_processors(policy.config, dataset_stats=meta.stats)[0]
    batch = batch_at(dataset, policy, prepare, meta, [5, 70], torch.float32)
    losses = []
    for each, given in ((stock, without_history(kind, policy, batch)), (policy, batch)):
        torch.manual_seed(5)
        with torch.no_grad():
            losses.append(each(given)[0])
    assert torch.equal(*losses)
    torch.manual_seed(7)
    observations = frames(dataset, prepare, torch.float32, 60)
    actions = []
    for each in (stock, policy):
        each.reset()
        torch.manual_seed(9)
        actions.append(torch.cat([each.select_action(dict(observation)) for observation in observations]))
    assert torch.equal(*actions)
    policy.train()
    policy(batch)[0].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for name, p in policy.named_parameters() if joins(name))


def test_attaching_what_does_not_fit_is_refused():
    stock = STOCK["act"][1](STOCK["act"][0](**features(64), **SMALL["act"]))
    with pytest.raises(UsageError, match="stock: got a policy of type 'act', expected DiffusionConfig's"):
        TraceDiffusionPolicy.from_stock(stock)
    with pytest.raises(UsageError, match="got 'none', which is the policy you have"):
        TraceActPolicy.from_stock(stock, MemoryOptions(name="none"))


def test_gradient_checkpointing_changes_nothing(dataset):
    """The blocks compute again what they were given, the readout included."""
    policy, prepare, meta = ours("diffusion", dataset)
    batch, found = batch_at(dataset, policy.train(), prepare, meta, [5, 70], torch.float32), []
    for asked in (False, True):
        policy.config.gradient_checkpointing = asked
        policy.zero_grad()
        torch.manual_seed(3)
        loss = policy(batch)[0]
        loss.backward()
        found.append((loss.detach(), policy.memory_head.memory.slots.W_V_read.weight.grad.clone()))
    assert found[0][1].abs().sum() > 0
    torch.testing.assert_close(found[1], found[0])


def test_the_unet_may_be_compiled(monkeypatch):
    """Traced by TorchDynamo, run as it was traced: with and without a readout it computes what it computes uncompiled."""
    compiler, graphs = torch.compile, []

    def traced(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, mode: compiler(module, backend=traced))
    policy = OURS["diffusion"][1](OURS["diffusion"][0](compile_model=True, **features(64), **SMALL["diffusion"]))
    unet = policy.diffusion.unet._orig_mod
    assert isinstance(unet, MemoryUnet)
    blocks = [part for part in unet.modules() if isinstance(part, MemoryBlock)]
    assert len(blocks) == len([part for part in blocks if hasattr(part, "memory_encoder")]) > 0
    for block in blocks:
        torch.nn.init.normal_(block.memory_encoder.weight, std=0.5)  # as after some training
    draw, config = torch.Generator().manual_seed(0), policy.config
    width = blocks[0].cond_encoder[1].in_features - config.diffusion_step_embed_dim
    x, condition = torch.randn(2, 16, 17, generator=draw), torch.randn(2, width, generator=draw)
    memory, timesteps, found = torch.randn(2, config.memory.width, generator=draw), torch.tensor([3, 7]), []
    for read in (memory, None):
        found.append(policy.diffusion.denoise(x, timesteps, condition, read))
        torch.testing.assert_close(found[-1], unet(x, timesteps, condition, unet.shifts(read)))
    assert graphs
    assert (found[0] - found[1]).abs().max() > 1e-3


@BOTH
def test_without_a_memory_it_is_the_stock_policy(kind, dataset):
    stock = STOCK[kind][1](STOCK[kind][0](**features(64), **SMALL[kind]))
    config = OURS[kind][0](memory=MemoryOptions(name="none"), **features(64), **SMALL[kind])
    policy = OURS[kind][1](config)
    assert [n for n, _ in policy.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert config.observation_delta_indices == stock.config.observation_delta_indices


def test_a_memory_that_needs_a_map_of_the_picture_is_refused():
    with pytest.raises(UsageError, match=r"memory.name: got 'events', .*expected one of none, trace"):
        MemoryOptions(name="events")


@pytest.mark.parametrize("name", [name for name in of_policies() if name != "none"])
def test_every_memory_trains_and_acts(name, dataset):
    policy, prepare, meta = ours("act", dataset, replace(WHOLE, name=name, history_frames=5, history_stride=3))
    policy.train()
    loss, logs = policy(batch_at(dataset, policy, prepare, meta, [0, 40, 150], torch.float32))
    loss.backward()
    assert torch.isfinite(loss)
    assert "l1_loss" in logs
    policy.reset()
    for observation in frames(dataset, prepare, torch.float32, 5):
        assert torch.isfinite(policy.select_action(observation)).all()


@pytest.mark.parametrize(("kind", "count"), [("act", 51_619_729), ("diffusion", 270_962_993)])
def test_stock_parameters_keep_names_and_numbers(kind, count):
    """With the paper's shapes: chunks of 100 for ACT, horizon 104 and one encoder for all cameras for Diffusion."""
    diffusion = {
        "horizon": 104,
        "n_action_steps": 100,
        "crop_shape": None,
        "use_separate_rgb_encoder_per_camera": False,
    }
    more = {"chunk_size": 100} if kind == "act" else diffusion
    with torch.device("meta"):
        policy = OURS[kind][1](OURS[kind][0](**features(96), **more))
        stock = STOCK[kind][1](STOCK[kind][0](**features(96), **more))
    mine = {n: p.shape for n, p in policy.named_parameters() if not n.startswith("memory_head.") and not joins(n)}
    assert mine == {n: p.shape for n, p in stock.named_parameters()}
    assert sum(shape.numel() for shape in mine.values()) == count


@BOTH
def test_memory_and_adapter_have_a_rate_of_their_own(kind, dataset):
    policy, *_ = ours(kind, dataset, replace(WHOLE, lr=3e-4))
    groups = policy.get_optim_params()
    assert [group.get("lr") for group in groups if group.get("lr") == 3e-4] == [groups[-1]["lr"]]
    named, own = dict(policy.named_parameters()), {id(p) for p in groups[-1]["params"]}
    assert {name for name, p in named.items() if id(p) in own} == {
        name for name in named if name.startswith("memory_head.") or joins(name)
    }
    numbers = [id(p) for group in groups for p in group["params"]]
    assert len(numbers) == len(set(numbers)) == len(list(policy.parameters()))


@BOTH
def test_a_wrong_observation_changes_nothing(kind, dataset):
    """Not even the queues of Diffusion: the next good observation gives what it would have given."""
    policy, prepare, _ = ours(kind, dataset)
    clocked = [
        row | {"observation.episode_step": torch.tensor([[float(step)]])}
        for step, row in enumerate(frames(dataset, prepare, torch.float32, 9))
    ]
    noise = {"noise": torch.zeros(1, 16, 17)} if kind != "act" else {}
    expected = [policy.select_action(dict(row), **noise) for row in clocked]
    policy.reset()
    for step, row in enumerate(clocked):
        before = policy.session and policy.session.carried()
        bad = row | {
            key: torch.full_like(row[key], torch.nan) for key in ("observation.raw_state", "observation.state")
        }
        with pytest.raises(ValueError, match="has a NaN"):
            policy.select_action(bad, **noise)
        with pytest.raises(ValueError, match=r"observation\.raw_state: is missing.*the policy's own preprocessor"):
            policy.select_action({k: v for k, v in row.items() if k != "observation.raw_state"})
        assert before is None or policy.session.carried() is before
        torch.testing.assert_close(policy.select_action(dict(row), **noise), expected[step])
    assert policy.session.state.steps.tolist() == [9]


@BOTH
def test_an_observation_that_comes_twice_is_written_once(kind, dataset):
    """By two calls, or because a finished row is shown its last frame again."""
    policy, prepare, _ = ours(kind, dataset)
    rows = frames(dataset, prepare, torch.float32, 3)
    for step, row in enumerate(rows):
        policy.observe(row | {"observation.episode_step": torch.tensor([[float(step)]])})
    before = policy.session.state
    for way in (policy.select_action, policy.predict_action_chunk, policy.observe):
        way(rows[2] | {"observation.episode_step": torch.tensor([[2.0]])})
        torch.testing.assert_close(policy.session.state, before)


@BOTH
def test_finished_rows_do_not_make_the_others_predict(kind, dataset, monkeypatch):
    policy, prepare, _ = ours(kind, dataset)
    rows, calls = frames(dataset, prepare, torch.float32, 12), []
    act = policy.act
    monkeypatch.setattr(policy, "act", lambda *inputs, **more: calls.append(1) or act(*inputs, **more))
    for step, row in enumerate(rows):
        batch = {k: torch.cat([x, rows[min(step, 5)][k]]) for k, x in row.items() if k.startswith("observation.")}
        batch["observation.episode_step"] = torch.tensor([[float(step)], [float(min(step, 5))]])
        policy.select_action(batch)
    assert len(calls) == 3  # twelve steps, four a chunk


def test_content_keeps_its_size_whatever_training_does_to_it(dataset):
    content = ours("act", dataset)[0].memory_head.content
    with torch.no_grad():
        content.vision.weight.mul_(100.0)
        content.state.weight.mul_(0.01)
    maps = [torch.randn(5, content.vision.in_features // content.grid**2, 3, 3)]
    v, p = content(maps, torch.randn(5, len(content.mean))).chunk(2, dim=-1)
    for part in (v, p):
        torch.testing.assert_close(part.mean(-1), torch.zeros(5), atol=1e-4, rtol=0)
        torch.testing.assert_close(part.var(-1, correction=0), torch.ones(5), atol=0.05, rtol=0)


def test_content_tells_where_something_is_but_not_in_which_camera():
    torch.manual_seed(0)
    left, right = torch.zeros(2, 1, 8, 6, 6)
    left[..., :2], right[..., 4:] = 1.0, 1.0
    state = torch.zeros(1, 4)
    for grid in (1, 3):
        content = Content(vision=8, channels=4, width=16, grid=grid)
        with torch.no_grad():
            pictures = [(left, right), (right, left), (left, left)]
            one, swapped, other = (content(list(maps), state) for maps in pictures)
        torch.testing.assert_close(one, swapped)
        assert torch.allclose(one, other, atol=1e-5) == (grid == 1)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_contents_of_another_form_are_refused(dataset, strict):
    policy, *_ = ours("act", dataset)
    weights = policy.state_dict()
    policy.load_state_dict(weights, strict=strict)
    policy.load_state_dict(
        {n: x for n, x in weights.items() if not n.startswith("memory_head.")}, strict=False
    )  # a stock one's
    weights["memory_head.form"] = torch.tensor(1)  # contents were the mean over the picture
    with pytest.raises(RuntimeError, match=rf"memory_head\.form: got 1, expected {FORM}"):
        policy.load_state_dict(weights, strict=strict)
    del weights["memory_head.form"]
    with pytest.raises(RuntimeError, match=rf"memory_head\.form: got 0, expected {FORM}"):
        policy.load_state_dict(weights, strict=strict)


def test_the_paper_pools_what_is_seen(dataset):
    grids = [ours("act", dataset, replace(WHOLE, name=name))[0].memory_head.content.grid for name in ("paper", "trace")]
    assert grids == [1, 3]
    assert not list(Content(vision=512, channels=4, width=512, grid=1).vision.parameters())
    smaller = torch.randn(2, 8, 2, 2)  # than the grid: every place gets something
    assert Content(vision=8, channels=4, width=16, grid=3)([smaller], torch.zeros(2, 4)).isfinite().all()


def test_a_policy_can_be_copied_after_training(dataset):
    policy, prepare, meta = ours("act", dataset)
    batch = batch_at(dataset, policy.train(), prepare, meta, [5], torch.float32)
    policy(batch)[0].backward()
    twin = copy.deepcopy(policy.eval())
    with torch.no_grad():
        torch.testing.assert_close(twin(batch)[0], policy(batch)[0])


def test_acting_before_training_is_reported_and_does_not_skip_the_statistics(dataset):
    policy, prepare, meta = ours("act", dataset)
    policy.memory_head.frames.zero_()
    policy.memory_head.content.std.fill_(100.0)
    with pytest.warns(UserWarning, match="the memory has no statistics yet"):
        policy.select_action(frames(dataset, prepare, torch.float32, 1)[0])
    policy(batch_at(dataset, policy, prepare, meta, [5], torch.float32))
    assert policy.memory_head.frames == meta.total_frames
    assert policy.memory_head.content.std.max() < 100


def test_a_broken_cache_is_made_anew(dataset, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "copy", ignore=shutil.ignore_patterns("trace_memory"))
    policy, *_ = ours("act", root)
    (kept,) = (root / "meta/trace_memory").glob("*.safetensors")
    good = kept.read_bytes()
    kept.write_bytes(good[:40])
    policy.memory_head.fit(policy.paths)
    assert kept.read_bytes() == good


def test_some_episodes_are_enough(dataset, tmp_path):
    """LeRobot downloads only the files of the episodes asked for."""
    root = shutil.copytree(dataset, tmp_path / "copy")
    (file,) = (root / "data").glob("**/*.parquet")
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.filter(pyarrow.compute.equal(table["episode_index"], 1)), file)
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=root)
    paths, first = Paths.of(meta), table["episode_index"].to_pylist().index(1)
    assert paths.look_up(torch.tensor([first + 4]))[1].tolist() == [4]
    with pytest.raises(DatasetError, match="frame 3 is not in the dataset's parquet files"):
        paths.look_up(torch.tensor([3]))
    pyarrow.parquet.write_table(table.slice(2), file)
    with pytest.raises(DatasetError, match="frames of episode 0 are missing"):
        Paths.of(meta)


@BOTH
def test_every_frame_is_encoded_once(kind, dataset):
    """In training the history and the current frame, in deployment the current one, whether an action is due or queued."""
    policy, prepare, meta = ours(kind, dataset, replace(WHOLE, history_frames=4, history_stride=2))
    counts: list[int] = []
    for backbone in policy.backbones:
        # every picture passes it, whether the encoder is called or written out
        pool = next(module for module in backbone.modules() if isinstance(module, torch.nn.MaxPool2d))
        pool.register_forward_hook(lambda _, inputs, output: counts.append(len(inputs[0])))
    with torch.no_grad():
        policy(batch_at(dataset, policy, prepare, meta, [0, 3, 30], torch.float32))
    history = 3 * (0 + 2 + 3)  # cameras times earlier frames: none; the first and frame 1; the first, 26 and 28
    assert sum(counts) == history + 3 * 3 * (1 if kind == "act" else policy.config.n_obs_steps)
    policy.reset()
    for number, observation in enumerate(frames(dataset, prepare, torch.float32, 4)):
        counts.clear()
        policy.select_action(observation)
        due = kind != "act" and number == 0  # Diffusion's own forward looks at n_obs_steps frames
        assert sum(counts) == 3 * (policy.config.n_obs_steps if due else 1)


def test_a_streaming_dataset_is_refused(dataset):
    """It gives the oldest frame it can reach for the first of an episode."""
    policy, prepare, meta = ours("act", dataset)
    data = StreamingLeRobotDataset(
        meta.repo_id, root=dataset, delta_timestamps=resolve_delta_timestamps(policy.config, meta), shuffle=False
    )
    batches = torch.utils.data.DataLoader(data, batch_size=8)
    with pytest.raises(DatasetError, match="Streaming datasets do not give a frame's true past"):  # noqa: PT012
        for batch in batches:
            with torch.no_grad():
                policy(prepare(batch))


def test_missing_cameras_are_named(dataset):
    policy, prepare, meta = ours("act", dataset)
    batch = batch_at(dataset, policy, prepare, meta, [10], torch.float32)
    batch["observation.images.top"] = batch.pop("observation.images.overhead")
    with pytest.raises(DatasetError, match=r"observation\.images\.overhead: not in the batch, whose cameras are .*top"):
        policy(batch)


def test_ways_that_skip_observations_are_refused(dataset):
    policy, prepare, _ = ours("act", dataset)
    assert not supports_rtc_inference(policy)
    with pytest.raises(ValueError, match="real-time chunking shows the policy only some observations"):
        policy.predict_action_chunk(frames(dataset, prepare, torch.float32, 1)[0], inference_delay=0)
    server = runpy.run_path(
        str(Path(lerobot.__file__).parent / "async_inference/constants.py")
    )  # itself refuses others
    assert not {"trace_act", "trace_diffusion"} & set(server["SUPPORTED_POLICIES"])


def test_missed_observations_are_reported(dataset):
    policy, prepare, _ = ours("act", dataset)
    rows = frames(dataset, prepare, torch.float32, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (0, 1):
            policy.select_action(rows[step] | {"observation.episode_step": torch.tensor([[float(step)]])})
    with pytest.warns(UserWarning, match="the memory missed observations"):
        policy.select_action(rows[2] | {"observation.episode_step": torch.tensor([[7.0]])})


def test_a_memory_that_is_never_written_is_reported(dataset, monkeypatch):
    policy, prepare, _ = ours("act", dataset)
    monkeypatch.setattr(session_module, "IDLE", 3)
    advance = policy.memory_head.memory.advance

    def idle(state, content, raw):
        new, readout = advance(state, content, raw)
        return new._replace(tensors=new.tensors | {"slots": torch.zeros_like(new.tensors["slots"])}), readout

    monkeypatch.setattr(policy.memory_head.memory, "advance", idle)
    first, second, third = frames(dataset, prepare, torch.float32, 3)
    policy.observe(first)
    policy.observe(second)
    with pytest.warns(UserWarning, match="nothing was written to the memory in 3 steps"):
        policy.observe(third)


def test_statistics_of_other_data_are_reported(dataset):
    policy, prepare, meta = ours("act", dataset)
    policy.memory_head.content.mean += 5.0
    with pytest.warns(UserWarning, match="the memory's statistics are not of this dataset"):
        policy(batch_at(dataset, policy, prepare, meta, [10], torch.float32))


def test_states_that_are_not_finite_are_named(dataset, tmp_path):
    root = shutil.copytree(dataset, tmp_path / "copy")
    (file,) = (root / "data").glob("**/*.parquet")
    table = pyarrow.parquet.read_table(file)
    states = table["observation.state"].to_pylist()
    states[7][2] = float("nan")
    column = table.schema.get_field_index("observation.state")
    table = table.set_column(column, table.schema.field(column), pyarrow.array(states, table.schema.field(column).type))
    pyarrow.parquet.write_table(table, file)
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=root)
    with pytest.raises(DatasetError, match=r"observation\.state of frame 7 \(episode 0\) is not finite"):
        Paths.of(meta)
    file.unlink()
    with pytest.raises(DatasetError, match="no parquet file below"):
        Paths.of(meta)


def test_paths_are_those_of_the_dataset(dataset):
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=dataset)
    paths, data = Paths.of(meta), LeRobotDataset("trace_bench/cable", root=dataset)
    lengths = [len(path) for path in paths.episodes()]
    assert sum(lengths) == len(data)
    path, t = paths.look_up(torch.tensor([3, lengths[0] + 5]))
    assert t.tolist() == [3, 5]
    torch.testing.assert_close(path[1], torch.stack([data[lengths[0] + k]["observation.state"] for k in range(6)]))
    torch.testing.assert_close(path[0, 4], path[0, 3])


def test_a_dataset_without_states_is_named(dataset):
    meta = LeRobotDatasetMetadata("trace_bench/cable", root=dataset)
    meta.info.features.pop("observation.state")
    with pytest.raises(DatasetError, match=r"has no feature 'observation\.state'"):
        Paths.of(meta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "tracce"}, "did you mean 'trace'"),
        ({"velocity_channels": [-1]}, r"memory.velocity_channels: got \[-1\], expected a list of numbers of channels"),
        ({"attach": "glue"}, "memory.attach: got 'glue', expected one of tokens, residual"),
        ({"history_frames": 1}, "memory.history_frames: got 1, expected 2 or more"),
        ({"period": 0}, "memory.period: got 0, expected 1 or more"),
        ({"width": 0}, "memory.width: got 0, expected 1 or more"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryOptions(**options)


def test_options_are_read_from_a_command_line():
    words = ["--memory.name=paper", "--memory.width=32", "--memory.velocity_channels=[0,1]", "--memory.paper.depth=2"]
    memory = draccus.parse(TraceActConfig, args=words).memory
    assert (memory.name, memory.width, memory.velocity_channels, memory.paper.depth) == ("paper", 32, [0, 1], 2)


@pytest.mark.parametrize("name", ["update_every", "rates", "adapter_lr", "preset", "path", "slots", "fade"])
def test_options_of_version_0_1_are_refused_with_the_new_name(name, tmp_path):
    TraceActConfig(**features(64)).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told["memory"][name] = 1
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=rf"memory\.{name} is (now|not an option any more)"):
        load_configuration(tmp_path)


def test_weights_of_version_0_1_are_refused(dataset, tmp_path):
    policy, *_ = ours("act", dataset)
    policy.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.replace("memory_head.", "recall."): x for name, x in weights.items()}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weights of version 0.1"):
        TraceActPolicy.from_pretrained(tmp_path)


def scatter(policy) -> None:
    """Weights drawn anew, each by its name, so that none is zero and no normalisation the identity."""
    for name, x in policy.state_dict().items():
        if x.is_floating_point() and not name.endswith(("running_var", "pos_grid", "pos_enc")):
            draw = torch.Generator().manual_seed(sum(name.encode()))
            size = x[0].numel() if x.ndim > 1 else 4
            x.copy_(torch.randn(x.shape, generator=draw) * (0.5 / size) ** 0.5)


EXACT = [
    ("act", {}),
    ("act", {"use_vae": False, "pre_norm": True}),
    ("diffusion", {}),
    ("diffusion, one encoder", {}),
    ("diffusion", {"n_obs_steps": 1, "prediction_type": "sample", "use_film_scale_modulation": True}),
]


@pytest.mark.parametrize(("kind", "more"), EXACT)
@pytest.mark.parametrize("training", [True, False])
def test_the_written_out_forward_is_the_stock_forward_to_the_bit(kind, more, training):
    """Loss, every gradient and the predicted chunk; dropout, random crops and noise included."""
    given, steps = features(64), more.get("n_obs_steps", 2)
    stock = STOCK[kind][1](STOCK[kind][0](**given, **SMALL[kind] | more))
    policy = OURS[kind][1](OURS[kind][0](memory=MemoryOptions(name="none"), **given, **SMALL[kind] | more))
    scatter(stock)
    policy.load_state_dict(stock.state_dict())
    draw = torch.Generator().manual_seed(4)
    length = policy.config.chunk_size if kind == "act" else policy.config.horizon
    shape = (3,) if kind == "act" else (3, steps)
    batch = {camera: torch.randn(*shape, 3, 64, 64, generator=draw) for camera in CAMERAS}
    batch |= {"observation.state": torch.randn(*shape, 17, generator=draw)}
    pad = torch.arange(length).expand(3, -1) > torch.tensor([[4], [length], [length - 2]])
    actions = {"action": torch.randn(3, length, 17, generator=draw), "action_is_pad": pad}
    losses = []
    for each in (stock, policy):
        each.train(training)
        torch.manual_seed(9)
        loss = each(batch | actions)[0]
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(policy.named_parameters(), stock.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    now = {key: x if kind == "act" else x[:, -1] for key, x in batch.items()}
    chunks = []
    for each in (stock, policy):
        each.eval().reset()
        torch.manual_seed(9)
        chunks.append(torch.stack([each.select_action(dict(now)) for _ in range(3)]))
    assert torch.equal(*chunks)


@pytest.mark.parametrize("kind", ["act", "diffusion, one encoder"])
def test_whole_episodes_and_single_targets_give_the_same_loss(kind, dataset):
    """One scan for all targets, or a history for each: the same readouts where every frame is seen."""
    policy, prepare, meta = ours(kind, dataset, dtype=torch.float64)
    data, times = LeRobotDataset("trace_bench/cable", root=dataset), [3, 10]
    batch = batch_at(dataset, policy, prepare, meta, times, torch.float64)
    stock = without_history(kind, policy, batch)
    wanted = ("observation.state", *CAMERAS)
    shown = [cast(prepare({k: data[t][k] for k in wanted}), torch.float64) for t in range(11)]
    path = torch.stack([data[t]["observation.state"] for t in range(11)]).double()
    known = MemoryInputs(
        states=path,
        written=torch.arange(11)[None],
        path=path[None],
        valid=torch.ones(1, 11, dtype=torch.bool),
        row=torch.zeros(2, dtype=torch.int64),
        time=torch.tensor(times),
    )
    whole = EpisodeBatch(
        frames=tuple(torch.cat([each[camera] for each in shown]) for camera in CAMERAS),
        encoded=False,
        seen=torch.tensor(times)[:, None] + torch.arange(1 - policy.config.n_obs_steps, 1),
        inputs={"observation.state": stock["observation.state"]},
        actions=stock["action"],
        action_is_pad=stock["action_is_pad"],
        memory=known,
    )
    found = []
    for each in (batch, whole):
        torch.manual_seed(6)
        with torch.no_grad():
            found.append(policy(each)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("page", ["concepts.md", "decisions/0024-explicit-forward.md"])
def test_the_forward_is_as_printed(page):
    """The three lines stand in the code of a control step, in this order."""
    (block,) = (text for text in (DOCS / page).read_text().split("```python\n")[1:] if "self.act(" in text)
    printed = [line.partition("  #")[0] for line in block.partition("```")[0].splitlines()]
    code = [line.strip() for line in inspect.getsource(MemoryPolicy.step).splitlines()]
    assert len(printed) == 3
    assert printed == [line for line in code if line in printed]


@pytest.mark.parametrize("kind", [MemoryUnet, MemoryDiffusion])
def test_no_forward_without_the_memory_is_inherited(kind):
    assert kind.__bases__ == (torch.nn.Module,)


def test_what_is_captured_is_a_pure_function(dataset):
    """ACT's network from tensors to tensors computes what the policy computes."""
    policy, *_ = ours("act", dataset)
    policy.train()
    draw = torch.Generator().manual_seed(2)
    maps = tuple(torch.randn(4, 512, 2, 2, generator=draw) for _ in CAMERAS)
    known = MemoryInputs(
        states=torch.randn(4, 17, generator=draw),
        written=torch.arange(4)[None],
        path=torch.randn(1, 4, 17, generator=draw),
        valid=torch.ones(1, 4, dtype=torch.bool),
        row=torch.zeros(2, dtype=torch.int64),
        time=torch.tensor([1, 3]),
    )
    state = {"observation.state": torch.randn(2, 17, generator=draw)}
    pad, actions = torch.zeros(2, 12, dtype=torch.bool), torch.randn(2, 12, 17, generator=draw)
    batch = EpisodeBatch(maps, True, torch.tensor([[1], [3]]), state, actions, pad, known)  # noqa: FBT003
    module, example = policy.flat_network(batch)
    seen, losses = [], []

    def network(*given):
        seen.append(module.given(*given))
        made, *latent = module(*seen[-1])
        return made, tuple(latent) or (None, None)

    for programs in (None, Programs(network=network)):
        torch.manual_seed(5)
        losses.append(policy(batch, programs=programs)[0])
    assert torch.equal(*losses)
    assert [x.shape for x in example] == [x.shape for x in seen[0]]
