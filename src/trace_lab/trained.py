"""A trained policy in its folder: where it is, of which training, its configuration, the policy itself ready to act, and
which pictures it needs of the suite. Who plays what with it is the business of `rollout`.
"""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trace_errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from trace_lab.rollout import PolicyRunner

FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")


@dataclass(frozen=True)
class Trained:
    """The policy of an evaluation: which checkpoint, and of which training."""

    checkpoint: str
    sha256: str  # of the weights
    sha256_config: str  # of configuration and processors
    checkpoint_step: int | None
    policy: str
    memory: str
    training_seed: int
    training_seed_known: bool  # if not, 0 stands for it

    @classmethod
    def of(cls, folder: Path, config: Any, seed: int | None) -> "Trained":
        """Of a checkpoint's folder."""
        step, rest = folder.parent.name, [folder / FILES[0], *sorted(folder.glob("policy_*"))]
        return cls(
            checkpoint=str(folder),
            sha256=hashlib.sha256((folder / FILES[1]).read_bytes()).hexdigest(),
            sha256_config=hashlib.sha256(b"".join(path.read_bytes() for path in rest)).hexdigest(),
            checkpoint_step=int(step) if step.isdigit() else None,
            policy=config.type.removeprefix("trace_"),
            memory=config.memory.name if hasattr(config, "memory") else "none",
            training_seed=seed or 0,
            training_seed_known=seed is not None,
        )


def find(path: Path) -> tuple[Path, Path | None]:
    """The folder of a policy, and its run if it is in one. The path may be either, or a checkpoint in between."""
    places = [path, path / "pretrained_model", path / "checkpoints" / "last" / "pretrained_model"]
    folder = next((place.resolve() for place in places if (place / FILES[0]).exists()), None)
    if folder is None:
        raise UsageError(f"{path}: no policy there; looked for {', '.join(str(place / FILES[0]) for place in places)}")
    if absent := [name for name in FILES if not (folder / name).exists()]:
        raise CheckpointError(f"{folder}: {', '.join(absent)} missing, expected what save_pretrained writes")
    if (folder / "run.json").exists():  # a checkpoint that was packed together with its run.json
        return folder, folder
    return folder, folder.parent.parent.parent if folder.parent.parent.name == "checkpoints" else None


def configuration(folder: Path, device: str) -> Any:
    """A checkpoint's configuration, on a device: auto, cpu or cuda."""
    from lerobot_policy_trace.loading import load_configuration
    from trace_lab.rollout import device_of

    return load_configuration(folder, cli_overrides=[f"--device={device_of(device)}"])


def runner(folder: Path, device: str, seed: int) -> "PolicyRunner":
    """The policy itself, ready to act in float32. Its noise, if it has any, comes from the seed."""
    import torch

    from lerobot_policy_trace.loading import load_policy
    from trace_lab.rollout import PolicyRunner

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with contextlib.redirect_stdout(StringIO()):  # LeRobot prints, and --json must be only that
        policy, before, after = load_policy(folder, device)
    torch.manual_seed(seed)
    return PolicyRunner(policy, before, after)


def pictures(config: Any) -> tuple[int, tuple[str, ...]]:
    """Size and cameras of the pictures that a policy takes; a UsageError if it needs what the suite does not have."""
    from trace_bench.robot import CAMERAS, CHANNELS

    shapes = {key.removeprefix("observation.images."): tuple(x.shape) for key, x in config.image_features.items()}
    size = next(iter(shapes.values()))[-1] if shapes else 96
    needs = {key: tuple(x.shape) for key, x in {**config.input_features, **config.output_features}.items()}
    needs = shapes | {key: shape for key, shape in needs.items() if key not in config.image_features}
    has = dict.fromkeys(CAMERAS, (3, size, size)) | dict.fromkeys(("observation.state", "action"), (len(CHANNELS),))
    if wrong := {key: shape for key, shape in needs.items() if has.get(key) != shape}:
        raise UsageError(f"checkpoint: the policy needs {wrong}; the suite has {has}")
    return size, tuple(camera for camera in CAMERAS if camera in shapes)


def encodes(step: int, interval: int, back: int, period: int) -> bool:
    """Whether a policy encodes the pictures of a control step: those at which it predicts a chunk of actions (every
    `interval` steps), `back` steps before each of these, and those at which its memory steps (every `period`; 0: never).
    """
    return -step % interval <= back or (period > 0 and step % period == 0)


def rendered(config: Any) -> Callable[[int], bool] | None:
    """The control steps whose pictures have to be rendered for a policy. None: all, for temporal ensembles, which predict
    at every step, and for stock policies, whose rows share a queue.
    """
    if not config.type.startswith("trace_") or getattr(config, "temporal_ensemble_coeff", None) is not None:
        return None
    period = 0 if config.memory.name == "none" else config.memory.period
    return partial(encodes, interval=config.n_action_steps, back=config.n_obs_steps - 1, period=period)
