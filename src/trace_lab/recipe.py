"""Every number of a training, as one frozen value (`Recipe`), and the named ones (`RECIPES`). A run keeps the recipe it was
made with; the loop that follows it is in `training`. Nothing heavy is imported here, so that wrong numbers are refused at
once.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from trace_errors import UsageError
from trace_memory.config import PaperOptions
from trace_memory.registry import METHODS, of_policies, paper_forms

POLICIES = {"act": "ACT", "diffusion": "Diffusion Policy"}  # in the order of tables
SCANS = ("episode", "budget")
BACKBONES = ("trained", "frozen")
PRECISIONS = ("auto", "bf16", "float32")

# Options of a memory that `--set memory.NAME=VALUE` changes, with what each is: those of the plug-in's `MemoryOptions`,
# whose import takes too long to find out that a name is misspelt. `memory.paper.NAME` are those of `PaperOptions`.
MEMORY_OPTIONS: dict[str, Any] = {
    "width": int, "hidden": int, "attach": str, "period": int, "history_frames": int, "history_stride": int,
    "dropout": float, "velocity_channels": list,
}  # fmt: skip
PAPER_OPTIONS: dict[str, Any] = {each.name: each.type for each in fields(PaperOptions)}

RENAMED = {
    "borrowed": "path_swap",
    "still": "rest_weight",
    "memory.update_every": "memory.period",
    "memory.budget": "memory.history_frames",
    "memory.stride": "memory.history_stride",
    "memory.rates": "memory.velocity_channels",
    "memory.key": "memory.paper.log_signature",
    "memory.lr": "memory_lr",
    "memory.adapter_lr": "memory_lr",
    "memory.name": "the option --memory",
    "memory.preset": "--preset for sizes and --memory paper for the paper's form",
} | {f"memory.{name}": f"memory.paper.{name}" for name in PAPER_OPTIONS}
_FORM = "it is part of what a memory is; --memory paper is the paper's form"
GONE = {
    "walk": "with path_swap another path is always followed along its arc length",
    "pauses": "what is written scales with the way made, so waiting adds nothing",
    "taught": "every frame teaches the encoder; episodes=4 or memory.period=4 need less memory",
    "shift": "jitter is the augmentation that is left",
    "starts": "rest_weight alone decides which frames are targets more often",
    "truncate": "the gradient passes through whole episodes; episodes=4 or memory.period=4 need less memory",
    "branches": "it needed labels that only the suite has",
    "policy.rest_action_steps": "policy.n_action_steps is the replan interval, at rest too",
} | {f"memory.{name}": _FORM for name in ("path", "clock", "gate", "fade", "bound", "start", "read_gain", "grid")}


def known(what: str, value: str, names: Sequence[str]) -> str:
    """The value, if it is one of these names; else an error with the nearest of them."""
    if value in names:
        return value
    near = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    raise UsageError(f"{what}: there is no {value!r}; {hint}")


@dataclass(frozen=True)
class Recipe:
    """How a policy is trained. An update learns from `episodes` times `targets` targets, whatever the method."""

    policy: str = "act"
    memory: str = "trace"
    cameras: str = "all"  # or the names of some, with commas between
    scan: str = "episode"  # whole episodes; or, for the paper's form, its "budget" of frames for each target
    steps: int = 20_000  # updates
    episodes: int = 8  # in an update
    targets: int = 32  # of each episode
    rest_weight: float = 1.0  # how often a frame before a second of rest is a target, as a share of the others
    path_swap: float = 0.0  # probability that an episode's memory is addressed by another one's path
    backbone: str = "trained"  # or "frozen": every picture is encoded once, before the first update
    lr: float = 1e-4
    backbone_lr: float = 1e-4
    memory_lr: float = 1e-4
    warmup: int = 200  # updates over which the learning rates rise; then they fall along a cosine to a tenth
    clip: float = 10.0  # largest norm of the gradient
    precision: str = "auto"  # bf16 on a GPU, float32 elsewhere; or one of these words
    jitter: float = 0.0  # share by which brightness and contrast change at most, in an episode alike
    checkpoint: int = 1_000  # updates between checkpoints
    policy_options: dict[str, Any] = field(default_factory=dict)  # of LeRobot's configuration
    memory_options: dict[str, Any] = field(default_factory=dict)  # of the plug-in's `MemoryOptions`

    def __post_init__(self) -> None:
        known("policy", self.policy, list(POLICIES))
        known("memory", self.memory, of_policies())
        known("scan", self.scan, SCANS)
        known("backbone", self.backbone, BACKBONES)
        known("precision", self.precision, PRECISIONS)
        for name, least in {"steps": 1, "episodes": 1, "targets": 1, "warmup": 0, "checkpoint": 1}.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected {least} or more")
        for name in ("lr", "backbone_lr", "memory_lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a positive number")
        if not 0 < self.rest_weight <= 1:
            raise UsageError(f"rest_weight: got {self.rest_weight}, expected more than 0 and at most 1")
        if not 0 <= self.path_swap <= 1:
            raise UsageError(f"path_swap: got {self.path_swap}, expected 0 to 1")
        if not 0 <= self.jitter < 1:
            raise UsageError(f"jitter: got {self.jitter}, expected 0 or more and less than 1")
        if self.path_swap and self.episodes == 1:
            raise UsageError(
                f"path_swap: got {self.path_swap} with episodes=1, where there is no other path; expected 0"
            )
        if self.scan == "budget":
            self._check_budget()

    def _check_budget(self) -> None:
        """What the budget scan cannot do."""
        if self.memory != "none" and not METHODS[self.memory].paper_form:
            raise UsageError(
                f"scan: got budget with memory {self.memory}, expected memory {', '.join(paper_forms())} or none"
            )
        if self.path_swap:
            raise UsageError(f"path_swap: got {self.path_swap} with scan=budget; it is for whole episodes, expected 0")
        if self.backbone == "frozen":
            raise UsageError("backbone: got frozen with scan=budget, which takes pictures; expected scan=episode")
        if (period := self.memory_options.get("period", 1)) != 1:
            raise UsageError(f"memory.period: got {period} with scan=budget, expected 1")

    @property
    def batch(self) -> int:
        """Targets of one update."""
        return self.episodes * self.targets

    def rate(self, step: int) -> float:
        """The factor on every learning rate at this update."""
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
    "n_action_steps": 6,  # chosen by episodes that no table counts. docs/decisions: what diffusion predicts
    "noise_scheduler_type": "DDIM",
    "num_inference_steps": 4,
    "prediction_type": "sample",  # the actions, not the noise: an eighth of the error after as many updates
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
SMALL_MEMORY = {"width": 64, "hidden": 64}
SWAP = 0.5  # half of the episodes: the path that was taken must not tell what to do

RECIPES: dict[str, dict[str, Recipe]] = {
    "default": {
        "act": Recipe(path_swap=SWAP, policy_options=ACT),
        "diffusion": Recipe(policy="diffusion", path_swap=SWAP, policy_options=DIFFUSION),
    },
    # LeRobot's own sizes and the paper's memory
    "paper": {
        "act": Recipe(memory="paper", policy_options=OFFLINE),
        "diffusion": Recipe(
            policy="diffusion", memory="paper",
            policy_options=OFFLINE | {"use_separate_rgb_encoder_per_camera": False},
        ),
    },
    # for two CPU cores
    "tiny": {
        "act": Recipe(
            steps=600, episodes=2, targets=16, path_swap=SWAP, warmup=50, lr=3e-4, backbone_lr=3e-4, memory_lr=1e-3,
            checkpoint=100, policy_options=SMALL_ACT, memory_options=SMALL_MEMORY,
        ),
        "diffusion": Recipe(
            policy="diffusion", steps=600, episodes=2, targets=16, path_swap=SWAP, warmup=50, memory_lr=1e-3,
            checkpoint=100, policy_options=DIFFUSION | {"down_dims": (64, 128)}, memory_options=SMALL_MEMORY,
        ),
    },
}  # fmt: skip


def names() -> list[str]:
    """Every name that `--set` takes, but for LeRobot's options of a policy (`policy.X`, `act.X`, `diffusion.X`)."""
    own = [
        each.name
        for each in fields(Recipe)
        if each.name not in ("policy", "memory", "policy_options", "memory_options")
    ]
    return [*own, *(f"memory.{name}" for name in MEMORY_OPTIONS), *(f"memory.paper.{name}" for name in PAPER_OPTIONS)]


def recipe(preset: str, policy: str, memory: str | None = None, changes: Mapping[str, Any] | None = None) -> Recipe:
    """A named recipe for a policy and a memory, with some numbers changed.

    Args:
        preset: one of `RECIPES`.
        policy: act or diffusion.
        memory: one of `METHODS`; None is the preset's own.
        changes: numbers by name. `policy.x` and `memory.x` are options of those; `act.x` and `diffusion.x` are for that
            policy only, so that one comparison can have both.

    Raises:
        UsageError: a name is not known, is old, or a number makes no sense; the message says which and what was expected.

    Example:
        recipe("tiny", "act", "trace", {"lr": 1e-3, "memory.period": 4, "policy.chunk_size": 20})
    """
    base = RECIPES[known("preset", preset, list(RECIPES))][known("policy", policy, list(POLICIES))]
    base = replace(base, memory=memory or base.memory)
    own: dict[str, Any] = {}
    options, memory_options = dict(base.policy_options), dict(base.memory_options)
    types = {each.name: each.type for each in fields(Recipe)}
    for name, value in (changes or {}).items():
        group, _, option = name.partition(".")
        if group in ("policy", *POLICIES) and option and name not in GONE:
            if group in ("policy", policy):
                options[option] = value
            if group != "policy":
                known(f"option {group}.", option, options_of(group))
            continue
        check_name(name)
        if option.startswith("paper."):
            if not METHODS[base.memory].paper_form:
                raise UsageError(f"{name}: got with memory {base.memory}, expected memory {' or '.join(paper_forms())}")
            option = option.removeprefix("paper.")
            paper = memory_options.get("paper", {})
            memory_options["paper"] = paper | {option: convert(name, value, PAPER_OPTIONS[option])}
        elif option:
            memory_options[option] = convert(name, value, MEMORY_OPTIONS[option])
        else:
            own[name] = convert(name, value, types[name])
    if not METHODS[base.memory].swaps_paths:
        own["path_swap"] = 0.0
    elif METHODS[base.memory].paper_form or own.get("episodes", base.episodes) == 1:
        own.setdefault("path_swap", 0.0)  # the paper does not, or there is no other path
    return replace(base, **own, policy_options=options, memory_options=memory_options)


def check_name(name: str) -> None:
    """Refuses a name that `--set` does not take, with the one that was meant."""
    every = names()
    if name in every:
        return
    for old in (name, f"memory.{name}"):
        if old in RENAMED:
            raise UsageError(f"{name}: is now {RENAMED[old]}")
        if old in GONE:
            raise UsageError(f"{name}: is gone: {GONE[old]}")
    if name in ("policy", "memory"):
        raise UsageError(f"{name}: is the option --{name}")
    for full in (f"memory.{name}", f"memory.paper.{name}"):
        if full in every:
            raise UsageError(f"option: there is no {name!r}; did you mean {full!r}?")
    known("option", name, every)


def options_of(policy: str) -> list[str]:
    """Names of LeRobot's options of a policy. Imports LeRobot, which takes a while."""
    from lerobot.configs.policies import PreTrainedConfig

    import lerobot_policy_trace  # noqa: F401  (registers the policies)

    return [each.name for each in fields(PreTrainedConfig.get_choice_class(f"trace_{policy}"))]


def convert(name: str, value: Any, kind: Any) -> Any:
    """A value of a kind, if it is one; whole numbers also count as float."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        int: number and math.isfinite(value) and value == int(value),
        float: number,
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        list: isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value),
    }
    words = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        list: "numbers, as in [0,1,2]",
    }
    if not right[kind]:
        raise UsageError(f"{name}: got {value!r}, expected {words[kind]}")
    return kind(value)


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """`name=value` words; a value is JSON, or a word."""
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(
                f"--set: got {setting!r}, expected NAME=VALUE, for instance lr=3e-4 or policy.dim_model=256"
            )
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
