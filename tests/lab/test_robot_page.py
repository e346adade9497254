"""The control loop of docs/robot.md does on a robot what it says, as it is printed there."""

import re
import time
from pathlib import Path

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors

from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceActPolicy
from trace_errors import ObservationError

PAGE = (Path(__file__).parents[2] / "docs/robot.md").read_text()
CHANNELS = [f"joint_{number}.pos" for number in range(6)]


class Arm:
    """A robot as LeRobot's are: measures six joints, sees one camera, and goes where it is told."""

    action_features = dict.fromkeys(CHANNELS, float)

    def __init__(self):
        self.joints, self.sent = dict.fromkeys(CHANNELS, 0.0), []

    def get_observation(self) -> dict:
        picture = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
        return self.joints | {"wrist": picture}

    def send_action(self, action: dict) -> None:
        self.sent.append(action)
        self.joints = dict(action)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    picture = {"observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
    config = TraceActConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (6,)), **picture},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (6,))},
        dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1, n_vae_encoder_layers=1, chunk_size=8,
        n_action_steps=4, pretrained_backbone_weights=None, device="cpu", memory=MemoryOptions(width=32, hidden=32),
    )  # fmt: skip
    policy, folder = TraceActPolicy(config), tmp_path_factory.mktemp("trained")
    policy.memory_head.frames.fill_(1)  # as after training
    statistics = {name: {"mean": torch.zeros(6), "std": torch.ones(6)} for name in ("observation.state", "action")}
    for part in (policy, *make_pre_post_processors(config, dataset_stats=statistics)):
        part.save_pretrained(folder)
    return folder


def test_the_loop_runs_as_it_is_printed(checkpoint, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("outputs/laundry/checkpoints/last/pretrained_model", str(checkpoint))
    loop: dict = {}
    exec(code, loop)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    arm = Arm()
    for _ in range(2):
        loop["episode"](arm, 0.4)
        assert loop["policy"].session.taken == [12]  # every observation was taken in, and a new episode began
    assert len(arm.sent) == 2 * 12
    assert arm.sent[0].keys() == arm.action_features.keys()
    old = loop["observe"](arm, 12) | {"observation.timestamp": time.time() - 1}
    with pytest.raises(ObservationError, match=r"observation.timestamp: 1\.\d+ s old, expected at most 0.5 s"):
        loop["policy"].select_action(old)
    loop["policy"].select_action(loop["observe"](arm, 12))  # the next good one goes on
    assert loop["policy"].session.taken == [13]
