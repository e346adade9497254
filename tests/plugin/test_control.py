"""The fast path: the eager policy's actions, and nothing lost when something is wrong. On CUDA too, where there is one."""

import copy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import OBS_STATE

from lerobot_policy_trace import (
    MemoryOptions,
    TraceActConfig,
    TraceActPolicy,
    TraceDiffusionConfig,
    TraceDiffusionPolicy,
)
from lerobot_policy_trace.processor_trace import RAW_STATE
from lerobot_policy_trace.session import EPISODE_STEP, TIMESTAMP
from trace_errors import ControlError, ObservationError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CAMERAS = [f"observation.images.{name}" for name in ("overhead", "left_wrist", "right_wrist")]
SIZE, WIDTH = 48, 5
ACT = {
    "dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "chunk_size": 9, "n_action_steps": 4,
}  # fmt: skip
DIFFUSION = {
    "horizon": 16, "n_action_steps": 4, "down_dims": (32, 64), "crop_shape": (44, 44), "num_inference_steps": 2,
    "noise_scheduler_type": "DDIM",
}  # fmt: skip
KINDS = {
    "act": (TraceActConfig, TraceActPolicy, ACT),
    "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy, DIFFUSION),
    "diffusion, one encoder, one observation": (
        TraceDiffusionConfig, TraceDiffusionPolicy,
        DIFFUSION | {"use_separate_rgb_encoder_per_camera": False, "n_obs_steps": 1},
    ),
    "diffusion, noise all along": (
        TraceDiffusionConfig, TraceDiffusionPolicy, DIFFUSION | {"noise_scheduler_type": "DDPM"},
    ),
}  # fmt: skip
TRACE = {"width": 64, "hidden": 64}


def make(kind="act", device="cpu", memory=TRACE, **options):
    pictures = {camera: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for camera in CAMERAS}
    config_class, policy_class, small = KINDS[kind]
    config = config_class(
        input_features={OBS_STATE: PolicyFeature(FeatureType.STATE, (WIDTH,)), **pictures},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (WIDTH,))},
        device=device, pretrained_backbone_weights=None, memory=MemoryOptions(**memory), **small | options,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = policy_class(config).to(device).eval()
    if policy.memory_head is not None:
        policy.memory_head.frames.fill_(1)
        for p in policy.memory_head.adapter.parameters():  # what starts at zero does so no more
            torch.nn.init.normal_(p, std=0.1)
    for module in policy.modules():  # statistics that are not the identity
        if hasattr(module, "running_var") and module.running_var is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return policy


def observations(rows, count, device="cpu", seed=1, restart=()):
    """`restart`: (step, row) where a row's episode begins anew."""
    generator = torch.Generator().manual_seed(seed)
    state, clock, found = torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, dtype=torch.int64), []
    for t in range(count):
        state = state + 0.1 * torch.randn(rows, WIDTH, generator=generator)
        for when, row in restart:
            if when == t:
                clock[row] = 0
                state[row] = torch.randn(WIDTH, generator=generator)
        batch = {camera: torch.rand(rows, 3, SIZE, SIZE, generator=generator) for camera in CAMERAS}
        batch |= {OBS_STATE: state.clone(), RAW_STATE: state.clone()}
        found.append({key: x.to(device) for key, x in batch.items()} | {EPISODE_STEP: clock.clone().to(device)})
        clock = clock + 1
    return found


@pytest.fixture(autouse=True)
def exactly():
    """Convolutions of the eager policy in float32, as those of the fast path are."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def both(policy, batches, rows, **options):
    """Actions of the eager policy, and of the fast one."""
    found, options = [], {"precision": "float32", "fuse": False} | options
    for fast in (False, True):
        each = copy.deepcopy(policy)
        each.reset()
        if fast:
            each.compile_for_control(rows, **options)
        torch.manual_seed(7)
        found.append(torch.stack([each.select_action(batch) for batch in batches]))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_actions_as_the_eager_policy_with_rows_that_restart(kind, device):
    policy = make(kind, device)
    batches = observations(3, 23, device, restart=[(5, 1), (6, 0), (6, 2), (15, 1)])
    eager, fast = both(policy, batches, 3)
    assert eager.std() > 1e-3
    torch.testing.assert_close(fast, eager, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "memory", [{"name": "none"}, {"name": "gru"}, TRACE | {"period": 3}, {"name": "signature-only"} | TRACE]
)
def test_whatever_the_memory(memory, device):
    policy = make("act", device, memory)
    eager, fast = both(policy, observations(2, 14, device, restart=[(7, 1)]), 2)
    torch.testing.assert_close(fast, eager, rtol=0, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fusing pays, and is used, on a GPU only")
def test_fused_on_a_gpu():
    """In a process of its own: torch.compile cannot look through the type checks that our tests add to every function."""
    folder = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {folder!r})\n"
        "import torch, test_control as t\n"
        "torch.backends.cudnn.allow_tf32 = False\n"
        "batches = t.observations(1, 30, 'cuda', restart=[(7, 0)])\n"
        "eager, fast = t.both(t.make('act', 'cuda'), batches, 1, fuse=True)\n"
        "bare, _ = t.both(t.make('act', 'cuda', {'name': 'none'}), batches, 1)\n"
        "print(float((fast - eager).abs().max()), float((bare - eager).abs().max()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    difference, of_memory = map(float, done.stdout.split()[-2:])
    assert difference < 1e-4 < of_memory


@pytest.mark.parametrize("device", DEVICES)
def test_five_hundred_steps_after_load_with_resets(device, tmp_path):
    make("act", device).save_pretrained(tmp_path)
    eager, fast = (TraceActPolicy.from_pretrained(tmp_path).to(device).eval() for _ in range(2))
    fast.compile_for_control(precision="float32", fuse=False)
    for number in range(2):
        eager.reset()
        fast.reset()
        for batch in observations(1, 250, device, seed=number):
            torch.testing.assert_close(fast.select_action(batch), eager.select_action(batch), rtol=0, atol=1e-4)


def test_residual_and_ensemble():
    policy = make("act", memory=TRACE | {"attach": "residual"}, n_action_steps=1, temporal_ensemble_coeff=0.01)
    eager, fast = both(policy, observations(1, 12, restart=[(7, 0)]), 1)
    torch.testing.assert_close(fast, eager, rtol=0, atol=1e-4)
    policy.compile_for_control(2)
    first, second = observations(2, 2)
    policy.select_action(first)
    second[EPISODE_STEP][1] = -1
    with pytest.raises(ObservationError, match="ensemble"):
        policy.select_action(second)


@pytest.mark.parametrize("fast", [False, True])
def test_observe_and_predict_count_as_observations(fast):
    """Shown, asked for a chunk or for an action: the memory takes each observation in. A row that began at one that was only
    shown starts a chunk of its own afterwards.
    """
    policy, other = make(), make()
    if fast:
        policy.compile_for_control(2)
    batches = observations(2, 9, restart=[(5, 1)])
    for batch in batches[:3]:
        other.select_action(batch)
        policy.select_action(batch)
    other.select_action(batches[3])
    policy.observe(batches[3])
    ours, theirs = policy.predict_action_chunk(batches[4]), other.predict_action_chunk(batches[4])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    policy.observe(batches[5])
    other.select_action(batches[5])
    ours, theirs = policy.select_action(batches[6]), other.predict_action_chunk(batches[6])
    torch.testing.assert_close(ours[1], theirs[1, 0], rtol=0, atol=1e-4)
    ours, theirs = policy.predict_action_chunk(batches[7]), other.predict_action_chunk(batches[7])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    bare = make(memory={"name": "none"})  # what was not shown is missed
    with pytest.raises(AssertionError):
        torch.testing.assert_close(bare.predict_action_chunk(batches[7]), ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_repeated_observations_are_taken_in_once(device):
    policy = make("act", device)
    batches = observations(1, 6, device)
    twice = [batch for batch in batches for _ in range(2)]
    eager, fast = both(policy, twice, 1)
    torch.testing.assert_close(fast, eager, rtol=0, atol=1e-4)


def damaged(batch, what):
    batch = dict(batch)
    if what == "not a number":
        batch[CAMERAS[1]] = batch[CAMERAS[1]].clone()
        batch[CAMERAS[1]][0, 0, 3, 3] = float("nan")
        return batch, ObservationError, "left_wrist: has a NaN"
    if what == "infinite state":
        batch[OBS_STATE] = batch[OBS_STATE] + float("inf")
        return batch, ObservationError, "^observation.state: has a NaN or infinite value"
    if what == "missing camera":
        del batch[CAMERAS[0]]
        return batch, ObservationError, r"overhead: is missing, got .*left_wrist.*expected \(1, 3, 48, 48\)"
    if what == "no raw state":
        del batch[RAW_STATE]
        return batch, ObservationError, "preprocessor"
    if what == "other size":
        batch[CAMERAS[0]] = batch[CAMERAS[0]][..., :40]
        return batch, ObservationError, r"overhead: got \(1, 3, 48, 40\).*expected \(1, 3, 48, 48\)"
    if what == "bytes":
        batch[CAMERAS[0]] = batch[CAMERAS[0]].to(torch.uint8)
        return batch, ObservationError, "uint8"
    if what == "other rows":
        return {key: torch.cat([x, x]) for key, x in batch.items() if key != TIMESTAMP}, ObservationError, "rows"
    if what == "coarse time":
        batch[TIMESTAMP] = torch.tensor(time.time(), dtype=torch.float32)
        return batch, ObservationError, "got torch.float32, expected .* float64"
    if what in ("no number", "tomorrow", "a word"):
        batch[TIMESTAMP] = {"no number": float("nan"), "tomorrow": time.time() + 86_400, "a word": "now"}[what]
        return batch, ObservationError, "timestamp: got .*, expected seconds"
    if what == "a plain clock":
        batch[EPISODE_STEP] = 3
        return batch, ObservationError, "episode_step: got int, expected 1 whole numbers"
    if what == "late":
        batch[TIMESTAMP] = torch.tensor(time.time() - 5, dtype=torch.float64)
        return batch, ObservationError, "5.* s old, expected at most 2"
    if what == "out of order":
        batch[TIMESTAMP] = time.time() - 1.9
        return batch, ObservationError, "before the observation taken in last"
    assert what == "no time"
    del batch[TIMESTAMP]
    return batch, ObservationError, "timestamp: is missing"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["act", "diffusion"])
@pytest.mark.parametrize(
    "what",
    [
        "not a number", "infinite state", "missing camera", "no raw state", "other size", "bytes", "other rows", "late",
        "out of order", "no time", "coarse time", "no number", "tomorrow", "a word", "a plain clock",
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_is_lost(what, kind, device):
    policy = make(kind, device)
    batches = observations(1, 11, device)
    policy.compile_for_control(late=2.0, fuse=False)

    def select(batch):
        return policy.select_action(batch | {TIMESTAMP: time.time()})

    for place in (3, 5, 8):  # in the middle of a chunk, and where a new one is due
        policy.reset()
        torch.manual_seed(3)
        expected = [select(batch) for batch in batches]
        policy.reset()
        torch.manual_seed(3)
        for t, batch in enumerate(batches):
            if t == place:
                bad, error, message = damaged(batch | {TIMESTAMP: time.time()}, what)
                with pytest.raises(error, match=message):
                    policy.select_action(bad)
            torch.testing.assert_close(select(batch), expected[t], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_fails_once(device, monkeypatch):
    policy = make("act", device)
    control = policy.compile_for_control(fuse=False)
    batches = observations(1, 10, device)
    expected = [policy.select_action(batch) for batch in batches]
    policy.reset()

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    for t, batch in enumerate(batches):
        if t in (2, 4):
            with monkeypatch.context() as patch:
                for name in control.programs:
                    patch.setitem(control.programs, name, fail)
                with pytest.raises(ControlError, match="out of memory"):
                    policy.select_action(batch)
        torch.testing.assert_close(policy.select_action(batch), expected[t], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_a_failure_in_the_middle_of_a_step(kind, monkeypatch):
    """After the pictures, the memory and half the policy were computed (and random numbers drawn)."""
    policy = make(kind)
    control = policy.compile_for_control()
    batches = observations(1, 10)
    torch.manual_seed(3)
    expected = [policy.select_action(batch) for batch in batches]
    policy.reset()
    torch.manual_seed(3)
    part = control.policy.model.action_head if kind == "act" else control.policy.diffusion.unet.final_conv

    def fail(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    for t, batch in enumerate(batches):
        if t in (4, 8):
            with monkeypatch.context() as patch:
                patch.setattr(part, "forward", fail)
                with pytest.raises(ControlError, match="cpu: CUDA error: unspecified launch failure"):
                    policy.select_action(batch)
        torch.testing.assert_close(policy.select_action(batch), expected[t], rtol=0, atol=0)


def test_an_interrupted_step_asks_for_a_reset(monkeypatch):
    policy = make()
    control = policy.compile_for_control()
    first, second, third = observations(1, 3)
    policy.select_action(first)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in control.programs:
            patch.setitem(control.programs, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            policy.select_action(second)
    with pytest.raises(ControlError, match="interrupted"):
        policy.select_action(third)
    policy.reset()
    policy.select_action(third)


def test_predictions_that_are_not_finite_never_come_out():
    policy = make()
    control = policy.compile_for_control()
    first, second = observations(1, 2)
    policy.select_action(first)
    control.policy.model.action_head.bias[0] = float("nan")
    with pytest.raises(ObservationError, match=r"^action: has a NaN"):
        policy.predict_action_chunk(second)


def test_a_copy_is_not_compiled():
    policy = make()
    policy.compile_for_control()
    other = copy.deepcopy(policy)
    assert other.session is None
    batch = observations(1, 1)[0]
    torch.testing.assert_close(other.select_action(batch), policy.select_action(batch), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_compiling_draws_no_random_numbers_and_may_be_done_in_inference_mode(kind):
    policy = make(kind)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        policy.compile_for_control()
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    for batch in observations(1, 6):
        policy.select_action(batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
def test_a_step_waits_once_for_its_action_and_allocates_nothing(monkeypatch):
    policy = make("act", "cuda")
    policy.compile_for_control(fuse=False)
    batches = [{key: x for key, x in batch.items() if key != EPISODE_STEP} for batch in observations(1, 12, "cuda")]
    for batch in batches:
        policy.select_action(batch)
    waits, wait = [], torch.cuda.Stream.synchronize

    def once(stream):
        torch.cuda.set_sync_debug_mode("default")
        waits.append(wait(stream))
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(torch.cuda.Stream, "synchronize", once)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")  # any other wait is an error
    try:
        for batch in batches:
            policy.select_action(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == len(batches)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_a_policy_without_cameras_is_refused_by_name():
    policy = make(memory={"name": "none"})
    policy.config.input_features = {OBS_STATE: policy.config.input_features[OBS_STATE]}
    with pytest.raises(ControlError, match="no pictures"):
        policy.compile_for_control()


def test_weights_that_changed_are_noticed_and_the_copy_is_frozen():
    policy = make()
    batches = observations(1, 3)
    policy.compile_for_control()
    before = [policy.select_action(batch) for batch in batches]
    with torch.no_grad():
        policy.model.action_head.bias.add_(1.0)
    with pytest.raises(ControlError, match="weights changed"):
        policy.reset()
    policy.compile_for_control()
    torch.testing.assert_close(policy.select_action(batches[0]), before[0] + 1.0)
    policy.use_eager()
    policy.reset()
    torch.testing.assert_close(policy.select_action(batches[0]), before[0] + 1.0, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_other_precisions_are_measured(precision, device, monkeypatch):
    policy = make("act", device)
    if precision == {"cpu": "tf32", "cuda": "fp16"}[device]:
        with pytest.raises(ControlError, match=f"precision: '{precision}' is not for {device}"):
            policy.compile_for_control(precision=precision, fuse=False)
        return
    control = policy.compile_for_control(precision=precision, fuse=False)
    assert 0 <= control.error < 0.05
    if precision != "tf32":
        assert control.error > 0
    policy.use_eager()
    eager, fast = both(policy, observations(1, 12, device), 1, precision=precision)
    torch.testing.assert_close(fast, eager, rtol=0, atol=0.05)
    with monkeypatch.context() as patch:  # of the same noise; of other noise they would differ by 2 and more
        patch.setattr("lerobot_policy_trace.compiled.TOLERANCE", 1.0)
        for other in ("diffusion", "diffusion, noise all along"):
            assert make(other, device).compile_for_control(precision=precision, fuse=False).error < 0.3
    if precision != "tf32":
        monkeypatch.setattr("lerobot_policy_trace.compiled.TOLERANCE", control.error / 2)
        with pytest.raises(ControlError, match="differ from float32"):
            policy.compile_for_control(precision=precision, fuse=False)


@pytest.mark.parametrize(("option", "value"), [("rows", 0), ("precision", "int4"), ("late", -1.0)])
def test_options_that_make_no_sense(option, value):
    with pytest.raises(ControlError, match=f"{option}.*{value}"):
        make().compile_for_control(**{option: value})


def test_what_a_compiled_policy_cannot_do():
    policy = make("diffusion")
    policy.compile_for_control()
    with pytest.raises(ControlError, match="noise"):
        policy.select_action(observations(1, 1)[0], noise=torch.zeros(1, 16, WIDTH))


def test_untrained_memories_and_missed_observations_are_told():
    policy = make()
    policy.memory_head.frames.zero_()
    with pytest.warns(UserWarning, match="not trained"):
        policy.compile_for_control()
    batches = observations(1, 5)
    policy.select_action(batches[0])
    with pytest.warns(UserWarning, match="missed observations"):
        policy.select_action(batches[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.select_action(batches[4])
