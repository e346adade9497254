"""Every number of a training, as one frozen value (`Recipe`) with named presets. A run keeps the recipe it was made with;
the loop that follows it is in `train`, the memories' own numbers are in `trace_memory.config`.
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

POLICIES = ("act", "diffusion")
SCANS = ("episode", "budget")
BACKBONES = ("trained", "frozen")
LONGEST = 600.0  # seconds of a pause: every one makes episodes longer


class RecipeError(ValueError):
    """A recipe that makes no sense; the message names the field, what came and what was expected."""


def known(what: str, value: str, names: Sequence[str]) -> str:
    """The value, if it is one of these names; else an error with the nearest of them."""
    if value in names:
        return value
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    raise RecipeError(f"{what}: there is no {value!r}; {hint}")


@dataclass(frozen=True)
class Recipe:
    """How a policy is trained. A batch has `episodes` times `targets` targets, whatever the method."""

    policy: str = "act"
    memory: str = "trace"
    cameras: str = "all"  # or the names of some, with commas between
    scan: str = "episode"  # whole episodes, or the paper's "budget" of frames for each target
    steps: int = 20_000  # updates
    episodes: int = 8  # episodes in a batch
    targets: int = 32  # targets of each
    still: float = 1.0  # how often a frame before a second of rest is a target, as a share of the others
    starts: float = 1.0  # how often a frame is a target with which the robot sets off after a rest, as a multiple
    branches: float = (
        1.0  # what a frame teaches the encoder if an unseen choice follows, as a share; the suite's data only
    )
    borrowed: float = 0.0  # share of whole episodes that are addressed by the path of another one in the batch
    walk: str = (
        "steps"  # how: the lender's steps one by one; or "way": as far along the lender's way as along one's own
    )
    pauses: float = 0.0  # seconds by which each rest of a whole episode is longer for the memory, at most
    truncate: int = 0  # frames after which the gradient through time is cut; 0 is never
    backbone: str = "trained"  # or "frozen": as it comes, every picture encoded once
    taught: float = 1.0  # share of frames that teach the encoder what to write; they count more in exchange
    lr: float = 1e-4
    backbone_lr: float = 1e-4
    memory_lr: float = 1e-4
    warmup: int = 200  # updates over which rates rise; then they fall along a cosine to a tenth
    clip: float = 10.0  # largest norm of the gradient
    precision: str = "auto"  # bf16 on a GPU, float32 elsewhere; or one of these words
    shift: int = 0  # pixels by which pictures are moved at most, an episode alike
    jitter: float = 0.0  # share by which brightness and contrast are changed at most, an episode alike
    checkpoint: int = 1_000  # updates between checkpoints
    policy_options: dict[str, Any] = field(default_factory=dict)  # of LeRobot's configuration
    memory_options: dict[str, Any] = field(default_factory=dict)  # of `MemoryOptions`

    def __post_init__(self) -> None:
        from trace_memory.config import MEMORIES

        known("policy", self.policy, POLICIES)
        known("memory", self.memory, list(MEMORIES))
        known("scan", self.scan, SCANS)
        known("walk", self.walk, ("steps", "way"))
        known("backbone", self.backbone, BACKBONES)
        if self.backbone == "frozen" and self.scan != "episode":
            raise RecipeError(
                f"backbone: got frozen with the {self.scan} scan, which takes pictures; expected scan=episode"
            )
        known("precision", self.precision, ("auto", "bf16", "float32"))
        for name, least in {"steps": 1, "episodes": 1, "targets": 1, "truncate": 0, "warmup": 0, "shift": 0}.items():
            if getattr(self, name) < least:
                raise RecipeError(f"{name}: got {getattr(self, name)}, expected {least} or more")
        if not 0 <= self.pauses <= LONGEST:
            raise RecipeError(f"pauses: got {self.pauses}, expected seconds, 0 to {LONGEST}")
        for name in ("borrowed", "pauses"):
            if getattr(self, name) and self.scan == "budget":
                raise RecipeError(f"{name}: got {getattr(self, name)} with the budget scan; it is for whole episodes")
        if self.borrowed and self.episodes == 1:
            raise RecipeError(f"borrowed: got {self.borrowed} with episodes=1, where nobody can lend; expected 0")
        for name in ("lr", "backbone_lr", "memory_lr", "clip", "checkpoint", "starts"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name}: got {getattr(self, name)}, expected a positive number")
        for name in ("taught", "still"):
            if not 0 < getattr(self, name) <= 1:
                raise RecipeError(f"{name}: got {getattr(self, name)}, expected more than 0 and at most 1")
        for name in ("branches", "borrowed"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"{name}: got {getattr(self, name)}, expected 0 to 1")
        if self.branches < 1 and (self.backbone == "frozen" or (self.scan == "budget" and self.memory != "none")):
            raise RecipeError(
                f"branches: got {self.branches} with backbone={self.backbone} and scan={self.scan}, expected 1: it is "
                "for an encoder that is trained, with whole episodes or without a memory"
            )
        if not 0 <= self.jitter < 1:
            raise RecipeError(f"jitter: got {self.jitter}, expected 0 or more and less than 1")
        if self.truncate and self.scan == "budget":
            raise RecipeError(f"truncate: got {self.truncate} with the budget scan, which has no long gradient to cut")

    @property
    def batch(self) -> int:
        """Targets of one update."""
        return self.episodes * self.targets

    def rate(self, step: int) -> float:
        """The factor on every learning rate at this update."""
        import math

        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


OFFLINE = {"pretrained_backbone_weights": None}  # nothing is downloaded unless asked for
ACT = OFFLINE | {"chunk_size": 40, "n_action_steps": 10}
DIFFUSION = OFFLINE | {
    "horizon": 32,
    "n_action_steps": 6,  # chosen with the next number and UNTOLD, by episodes that no table counts. 0016, 0020
    "noise_scheduler_type": "DDIM",
    "num_inference_steps": 4,
    "prediction_type": "sample",  # the actions, not the noise: an eighth of the error after as many updates. 0016
    "drop_n_last_frames": 0,  # else nobody learns how an episode ends
    "use_separate_rgb_encoder_per_camera": False,
}
SMALL_ACT = ACT | {
    "dim_model": 128,
    "n_heads": 4,
    "dim_feedforward": 256,
    "n_encoder_layers": 2,
    "n_vae_encoder_layers": 1,
}

# The first frame stays at hand, and a robot at rest writes nothing: who cannot count looks at the lamp. docs/decisions/0014
PATIENT = {"anchor": True, "clock": "path"}
UNTOLD = PATIENT | {"path": "routes"}  # Diffusion Policy, told of its path, misses its first grasp on Tool. 0019
LENT = 0.5  # so many episodes are addressed by another's path: what path one took must not tell what to do. 0015

PRESETS: dict[str, dict[str, Recipe]] = {
    "default": {
        "act": Recipe(borrowed=LENT, policy_options=ACT, memory_options=PATIENT),
        "diffusion": Recipe(policy="diffusion", borrowed=LENT, policy_options=DIFFUSION, memory_options=UNTOLD),
    },
    # LeRobot's own sizes and the paper's memory
    "paper": {
        "act": Recipe(policy_options=OFFLINE, memory_options={"preset": "paper"}),
        "diffusion": Recipe(
            policy="diffusion",
            policy_options=OFFLINE | {"use_separate_rgb_encoder_per_camera": False},
            memory_options={"preset": "paper"},
        ),
    },
    # for two CPU cores
    "tiny": {
        "act": Recipe(
            steps=600, episodes=2, targets=16, borrowed=LENT, warmup=50, lr=3e-4, backbone_lr=3e-4, memory_lr=1e-3,
            checkpoint=100,
            policy_options=SMALL_ACT, memory_options=PATIENT | {"preset": "tiny"},
        ),
        "diffusion": Recipe(
            policy="diffusion", steps=600, episodes=2, targets=16, borrowed=LENT, warmup=50, memory_lr=1e-3, checkpoint=100,
            policy_options=DIFFUSION | {"down_dims": (64, 128)}, memory_options=UNTOLD | {"preset": "tiny"},
        ),
    },
}  # fmt: skip


def recipe(preset: str, policy: str, memory: str, changes: Mapping[str, Any]) -> Recipe:
    """A preset for a policy and a memory, with some numbers changed; `policy.x` and `memory.x` are options of those, and
    `act.x` and `diffusion.x` of that policy only, so that one comparison can have both.
    """
    known("preset", preset, list(PRESETS))
    base = replace(PRESETS[preset][known("policy", policy, POLICIES)], memory=memory)
    own: dict[str, Any] = {}
    nested = {"policy": dict(base.policy_options), "memory": dict(base.memory_options)}
    if "memory.preset" in changes:
        nested["memory"] = {}  # a preset of the memory's own brings its own numbers
    types = {each.name: each.type for each in fields(Recipe)}
    for name, value in changes.items():
        group, _, option = name.partition(".")
        if option and group in POLICIES:
            known(f"option {group}.", option, options_of(group))
            nested["policy"] |= {option: value} if group == policy else {}
            continue
        if option:
            nested[known("option", group, list(nested))][option] = value
            continue
        kind = types[known("option", name, [n for n in types if not n.endswith("_options")])]
        own[name] = convert(name, value, {int: int, float: float, str: str}[kind])  # type: ignore[index]
    alone = memory == "none" or own.get("scan") == "budget" or own.get("episodes", base.episodes) == 1
    if alone or "memory.preset" in changes:
        own.setdefault("borrowed", 0.0)  # there is nobody to lend, and the paper does not
    return replace(base, **own, policy_options=nested["policy"], memory_options=nested["memory"])


def options_of(policy: str) -> list[str]:
    """Names of LeRobot's options of a policy, so that a misspelt one is noticed also where another policy is trained."""
    from lerobot.configs.policies import PreTrainedConfig

    import lerobot_policy_trace  # noqa: F401  (registers the policies)

    return [each.name for each in fields(PreTrainedConfig.get_choice_class(f"trace_{policy}"))]


def convert(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    """A value of a kind, if it is one."""
    right = isinstance(value, str) if kind is str else isinstance(value, int | float) and not isinstance(value, bool)
    if not right or (kind is int and value != int(value)):
        raise RecipeError(
            f"{name}: got {value!r}, expected {'a word' if kind is str else getattr(kind, '__name__', '')}"
        )
    return kind(value)


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """`name=value` words; a value is JSON, or a word."""
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise RecipeError(
                f"--set: got {setting!r}, expected NAME=VALUE, for instance lr=3e-4 or policy.dim_model=256"
            )
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
