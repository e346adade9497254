"""An encoder that is not trained: fitted to the pictures, used once on each, and what is learnt from it is the same."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from lerobot_policy_trace.capture import Programs
from lerobot_policy_trace.encoder import calibrate
from trace_errors import DatasetError, UsageError
from trace_lab import features
from trace_lab.features import VARIANTS, Encoding, FeatureMaps
from trace_lab.frames import open_dataset, open_frames
from trace_lab.policy import cameras
from trace_lab.recipe import recipe
from trace_lab.sampling import Batches
from trace_lab.training import Training, run_training

SMALL = {
    "backbone": "frozen", "steps": 4, "episodes": 2, "targets": 3, "checkpoint": 2, "policy.dim_model": 32,
    "policy.n_heads": 2, "policy.dim_feedforward": 32, "policy.n_encoder_layers": 1, "policy.n_vae_encoder_layers": 1,
    "policy.chunk_size": 8, "policy.n_action_steps": 4, "memory.period": 32,
    "memory.width": 32, "memory.hidden": 32, "cameras": "overhead",
}  # fmt: skip


DIFFUSION = {
    **{name: x for name, x in SMALL.items() if not name.startswith("policy.")},
    "policy.horizon": 16, "policy.n_action_steps": 4, "policy.down_dims": [32, 64],
}  # fmt: skip


def made(memory: str = "trace", policy: str = "act", **changes):
    return recipe("tiny", policy, memory, {"act": SMALL, "diffusion": DIFFUSION}[policy] | changes)


def begin(dataset, memory: str = "trace", cache=None, seed: int = 0, **changes) -> Training:
    asked, meta = made(memory, **changes), open_dataset(dataset)
    store = open_frames(meta, "cpu", cameras=cameras(asked, meta))
    return Training.begin(asked, seed, store, Accelerator(cpu=True), Console(quiet=True), cache)


def test_normalisations_get_the_statistics_of_pictures():
    torch.manual_seed(0)
    backbone = resnet18(weights=None, norm_layer=FrozenBatchNorm2d)
    pictures = torch.rand(16, 3, 32, 32) + 3.0
    with torch.no_grad():
        before = backbone.bn1(backbone.conv1(pictures))
        calibrate(backbone, pictures)
        after = backbone.bn1(backbone.conv1(pictures))
        seen = []
        for module in backbone.modules():
            if isinstance(module, FrozenBatchNorm2d):
                module.register_forward_hook(
                    lambda _module, _given, out: seen.append(out.clone())
                )  # ReLU works in place
        backbone(pictures)
    assert before.mean((0, 2, 3)).abs().max() > 0.5
    assert after.mean((0, 2, 3)).abs().max() < 1e-3
    assert max(float(each.mean((0, 2, 3)).abs().max()) for each in seen) < 1e-2  # in every layer
    torch.testing.assert_close(after.std((0, 2, 3)), torch.ones(64), atol=1e-2, rtol=0)


@pytest.mark.parametrize("policy", ["act", "diffusion"])
@pytest.mark.parametrize("memory", ["none", "trace"])
def test_what_is_encoded_once_teaches_what_pictures_teach(dataset, memory, policy):
    training = begin(dataset, memory, policy=policy)
    policy, fast = training.policy, training.batches
    slow = Batches(fast.store, fast.config, fast.prepare, fast.recipe, fast.seed)  # of pictures
    assert (fast.at(0).encoded, slow.at(0).encoded) == (True, False)
    losses = []
    for batches in (fast, slow):
        torch.manual_seed(0)
        losses.append(policy(batches.at(0))[0])
    torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)


def test_the_encoder_stays_and_the_rest_learns(dataset, tmp_path):
    training = begin(dataset)
    before = {name: x.clone() for name, x in training.policy.state_dict().items()}
    training.update()
    after = training.policy.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items() if "backbone" in name)
    moved = [name for name, x in before.items() if x.is_floating_point() and not torch.equal(after[name], x)]
    assert any("memory_head" in name for name in moved)
    assert any("decoder" in name for name in moved)


def test_stopped_it_ends_where_it_would_have_ended(dataset, tmp_path):
    quiet = Console(quiet=True)
    run_training(dataset, tmp_path / "a", made(), 0, device="cpu", console=quiet)
    training = begin(dataset)
    for _ in range(2):
        training.update()
    training.write(tmp_path / "half")
    other = begin(dataset)
    other.read(tmp_path / "half")
    for _ in range(2):
        other.update()
    whole = load_file(tmp_path / "a" / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
    mine = other.policy.state_dict()
    assert all(torch.equal(mine[name], x) for name, x in whole.items())


def test_variants_differ_and_an_episode_has_one(dataset):
    training = begin(dataset, jitter=0.3)
    kept: FeatureMaps = training.batches.maps
    maps = next(iter(kept.maps.values()))
    assert len(maps) == VARIANTS
    assert not torch.equal(maps[0], maps[1])
    assert len(next(iter(begin(dataset).batches.maps.maps.values()))) == 1
    rows, owner = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])
    camera = next(iter(kept.maps))
    variants = set()
    for seed in range(8):
        found = kept(camera, rows, owner, torch.Generator().manual_seed(seed))
        which = [
            next(k for k in range(VARIANTS) if torch.equal(maps[k, row], x)) for row, x in zip(rows, found, strict=True)
        ]
        assert which[0] == which[1]
        assert which[2] == which[3]
        variants.add(tuple(which))
    assert len(variants) > 1


def test_what_makes_no_sense_is_named(dataset):
    with pytest.raises(UsageError, match="backbone: there is no 'frosen'; did you mean 'frozen'"):
        made(backbone="frosen")
    with pytest.raises(UsageError, match="backbone: got frozen with scan=budget"):
        made("none", scan="budget")
    with pytest.raises(UsageError, match="cropped anew each time"):
        begin(dataset, policy="diffusion", **{"policy.crop_shape": [40, 40]})
    with pytest.raises(UsageError, match="cameras: got rear, expected all, or some of overhead, left_wrist"):
        cameras(made(cameras="overhead,rear"), open_dataset(dataset))
    assert cameras(made(cameras="observation.images.left_wrist, overhead"), open_dataset(dataset)) == [
        "observation.images.overhead",
        "observation.images.left_wrist",
    ]


def test_runs_with_the_same_encoder_share_a_cache(dataset, tmp_path, monkeypatch):
    first = begin(dataset, cache=tmp_path)
    alone = begin(dataset)
    called, maps = [], Encoding.maps
    monkeypatch.setattr(Encoding, "maps", lambda self: called.append(1) or maps(self))
    second = begin(dataset, "gru", cache=tmp_path)
    assert not called
    for each in (first, second):
        assert torch.equal(each.batches.maps.maps["observation.images.overhead"],
                           alone.batches.maps.maps["observation.images.overhead"])  # fmt: skip
    for changes in ({"seed": 1}, {"jitter": 0.1}):  # another encoder, another augmentation
        called.clear()
        begin(dataset, cache=tmp_path, **changes)
        assert called
    whole, still = {"policy.crop_is_random": False}, {"policy.crop_is_random": False, "policy.crop_shape": [60, 60]}
    called.clear()
    for changes in (whole, still, whole):
        begin(dataset, policy="diffusion", cache=tmp_path, **changes)
    assert len(called) == 2  # the same weights, another way to them
    for kept in (tmp_path / "features").glob("*.safetensors"):
        kept.write_bytes(b"torn")
    with pytest.raises(DatasetError, match="cannot be read"):
        begin(dataset, cache=tmp_path)
    monkeypatch.setattr(features, "save_file", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(DatasetError, match=r"could not be written \(No space left"):
        begin(dataset, cache=tmp_path, seed=2)
    assert not list((tmp_path / "features").glob("*.tmp"))


def test_maps_that_do_not_fit_are_refused(dataset, monkeypatch):
    monkeypatch.setattr(features, "ram", lambda: 1000)
    with pytest.raises(DatasetError, match=r"frozen needs .* GB for the feature maps of .* frames, 1 times each"):
        begin(dataset)


def both_ways(training, network) -> list:
    """Loss and gradients of a batch, with the policy's own network and with another in its place."""
    policy, batch, found = training.policy, training.batches.at(0), []
    for programs in (None, Programs(network=network)):
        policy.zero_grad()
        torch.manual_seed(0)
        loss = policy(batch, programs=programs)[0]
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]))
    return found


@pytest.mark.parametrize(("memory", "vae"), [("none", "true"), ("trace", "true"), ("trace", "false")])
def test_what_would_be_captured_is_acts_own_network(dataset, memory, vae):
    training = begin(dataset, memory, **{"policy.use_vae": vae == "true", "policy.dropout": 0.0})
    module, example = training.policy.flat_network(training.batches.at(0))
    used = []

    def network(*given):
        used.append(module.given(*given))
        actions, *latent = module(*used[-1])
        return actions, tuple(latent) or (None, None)

    losses = both_ways(training, network)
    assert [x.shape for x in used[0]] == [x.shape for x in example]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("memory", ["none", "trace"])
def test_what_would_be_captured_is_the_unets_own_forward(dataset, memory):
    """With all of its weights: what is not among them gets no gradient from a graph."""
    training = begin(dataset, memory, policy="diffusion")
    policy = training.policy
    for name, p in policy.named_parameters():
        if "memory_encoder" in name:
            torch.nn.init.normal_(p, std=0.05)  # as after some training
    module, example = policy.flat_network(training.batches.at(0))
    used = []

    def network(*given):
        used.append([x for x in given if x is not None])
        return module(*used[-1])

    losses = both_ways(training, network)
    assert [x.shape for x in used[0]] == [x.shape for x in example]
    torch.testing.assert_close(*losses)
    reached = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    mine = {id(p) for p in module.parameters()}
    unet = {name for name, p in policy.named_parameters() if id(p) in mine}
    assert unet == {name for name in reached if "unet" in name}


def test_act_and_diffusion_policy_share_the_maps_of_the_same_encoder(dataset):
    """The same ResNet under other names."""
    act, diffusion = begin(dataset), begin(dataset, policy="diffusion")

    def digests():
        return [Encoding(x.policy, x.batches.store, x.before, x.made, Console()).digest for x in (act, diffusion)]

    assert len(set(digests())) == 2
    drawn = [x for name, x in resnet18(weights=None).state_dict().items() if not name.startswith("fc.")]
    for training in (act, diffusion):
        own = training.policy.backbones[0].state_dict().items()
        kept = [x for name, x in own if not name.endswith("num_batches_tracked")]
        for mine, x in zip(kept, [x for x in drawn if x.ndim], strict=True):  # counters have no dimension
            mine.copy_(x)
    assert len(set(digests())) == 1
    rows = torch.arange(4)
    pictures = [act.batches.store.pictures(camera, rows) for camera in act.batches.store.cameras]
    with torch.no_grad():
        both = [training.policy.encode(pictures) for training in (act, diffusion)]
    torch.testing.assert_close(*both)
    assert float(diffusion.update()["loss"]) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("policy", ["act", "diffusion"])
@pytest.mark.parametrize(
    ("memory", "backbone"), [("none", "frozen"), ("none", "trained"), ("trace", "frozen"), ("gru", "frozen")]
)
def test_captured_it_learns_the_same(dataset, memory, backbone, policy, precision):
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests have asked for the CPU
    calm = {"memory.dropout": 0.0} | ({"policy.dropout": 0.0} if policy == "act" else {})
    asked = made(memory, backbone=backbone, policy=policy, precision=precision, **calm)
    meta = open_dataset(dataset)
    store = open_frames(meta, "cuda", cameras=cameras(asked, meta))
    found = []
    for captured in (True, False):
        accelerator = Accelerator(mixed_precision="no")
        training = Training.begin(asked, 0, store, accelerator, Console(quiet=True))
        assert training.programs.network is not None
        if not captured:
            training.programs = None
        found.append([float(training.update()["loss"]) for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel={"float32": 1e-3, "bf16": 3e-2}[precision])
