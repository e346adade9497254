"""A checkpoint from anyone is data, not a program. LeRobot makes any class that a processor file names; here both files are
checked before it reads them. Steps, options and types are those that LeRobot and this plug-in write for the policies below.
Weights that a seed draws need not be stored: a lean checkpoint has the seed in their place (docs/decisions/0022).
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from draccus.utils import ParsingError
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lerobot_policy_trace.configuration_trace import RENAMED
from trace_errors import CheckpointError

WEIGHTS = "model.safetensors"
SEED = "drawn_from_seed"  # in the metadata of a lean file
SHOWN = "drawn."  # before the name of a weight that was left out
FEW = 8  # numbers of such a weight that stay
CONFIG, BEFORE, AFTER = "config.json", "policy_preprocessor.json", "policy_postprocessor.json"
STOCK = {
    BEFORE: ("rename_observations_processor", "to_batch_processor", "device_processor", "normalizer_processor"),
    AFTER: ("unnormalizer_processor", "device_processor"),
}
OURS = STOCK | {BEFORE: (*STOCK[BEFORE], "trace_keep_raw_state")}
STEPS = {"act": STOCK, "diffusion": STOCK, "trace_act": OURS, "trace_diffusion": OURS}
Kind = tuple[str, Callable[[Any], bool]]  # in words, and whether a value is of it


def _feature(x: Any) -> bool:
    if not isinstance(x, dict) or set(x) != {"type", "shape"}:
        return False
    shape, kinds = x["shape"], [str(kind.value) for kind in FeatureType]
    return x["type"] in kinds and isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)


def _table(what: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(what(each) for each in x.values())


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _normalised(x: Any) -> bool:
    kinds, modes = [str(kind.value) for kind in FeatureType], [str(mode.value) for mode in NormalizationMode]
    return isinstance(x, dict) and all(kind in kinds and mode in modes for kind, mode in x.items())


NORMALISER: dict[str, Kind] = {
    "features": ("a table of names to type and shape", _table(_feature)),
    "norm_map": ("a table of LeRobot's kinds of feature to its kinds of normalisation", _normalised),
    "eps": ("a number", lambda x: type(x) in (int, float)),
    "normalize_observation_keys": (
        "a list of names",
        lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
    ),
}
OPTIONS: dict[str, dict[str, Kind]] = {
    "rename_observations_processor": {"rename_map": ("a table of names to names", _table(_text))},
    "to_batch_processor": {},
    "device_processor": {
        "device": ("a text", _text),
        "float_dtype": ("a text or null", lambda x: x is None or isinstance(x, str)),
    },
    "trace_keep_raw_state": {},
    "normalizer_processor": NORMALISER,
    "unnormalizer_processor": NORMALISER,
}
NEEDED = {"normalizer_processor": ("features", "norm_map"), "unnormalizer_processor": ("features", "norm_map")}


def policy_type(folder: Path, expected: tuple[str, ...] = tuple(STEPS)) -> str:
    """Of the checkpoint in a folder, from its config.json; a CheckpointError unless it is one of these."""
    file = folder / CONFIG
    found = _read(file).get("type")
    if found not in expected:
        raise CheckpointError(f"{file}: type: got a policy of type {found!r}, expected one of {', '.join(expected)}")
    return str(found)


def load_configuration(folder: Path, **options: Any) -> Any:
    """The policy's configuration, when its type and options are known and its processors are harmless."""
    kind, memory = policy_type(folder), _read(folder / CONFIG).get("memory")
    for name in memory if isinstance(memory, dict) else ():
        if name in RENAMED:
            raise CheckpointError(f"{folder / CONFIG}: memory.{name} {RENAMED[name]} (CHANGELOG, 0.2)")
    check_processors(kind, folder)
    try:
        return PreTrainedConfig.from_pretrained(folder, **options)
    except ParsingError as error:
        raise CheckpointError(f"{folder / CONFIG}: {' '.join(str(error.__cause__ or error).split())[:300]}") from error


def load_processors(config: Any, folder: Path, **options: Any) -> tuple[Any, Any]:
    """The pre- and postprocessor of a checkpoint. The only place that loads them."""
    check_processors(config.type, folder)
    try:
        return make_pre_post_processors(config, pretrained_path=str(folder), **options)
    except (ValueError, TypeError, LookupError, RuntimeError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: its processors cannot be loaded. {reason}") from error


def load_policy(folder: str | Path, device: str = "cpu") -> tuple[Any, Any, Any]:
    """A trained policy of a folder that `save_pretrained` wrote, and its pre- and postprocessor, ready to act on a device.

    Args:
        folder: with config.json, model.safetensors and the processor files.
        device: cpu or cuda.

    Returns:
        The policy in evaluation mode, its preprocessor and its postprocessor.

    Raises:
        CheckpointError: a file is missing, damaged, or asks for what no policy of ours needs.

    Example:
        >>> from lerobot_policy_trace import load_policy
        >>> policy, before, after = load_policy("checkpoints/signal/trace")  # doctest: +SKIP
        >>> action = after(policy.select_action(before(observation)))  # doctest: +SKIP
    """
    config = load_configuration(Path(folder), cli_overrides=[f"--device={device}"])
    config = replace(config, pretrained_backbone_weights=None)  # they come from the checkpoint, not from the network
    with contextlib.redirect_stdout(StringIO()):  # LeRobot prints
        try:
            policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{folder}: its weights do not fit. {' '.join(str(error).split())[:300]}") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{Path(folder) / WEIGHTS}: not a whole safetensors file ({error})") from error
        override = {"device_processor": {"device": device}}
        pipelines = load_processors(config, Path(folder), preprocessor_overrides=override)
    return policy, *pipelines


def load_weights(policy: Any, file: str, load: Callable[..., Any], device: str) -> Any:
    """A policy with the weights of a file: LeRobot's way (`load`), but for lean files and those of version 0.1."""
    with safe_open(file, "pt") as content:
        old = any(name.startswith("recall.") for name in content.keys())  # noqa: SIM118
    if old:
        raise CheckpointError(
            f"{file}: recall.*: weights of version 0.1 (CHANGELOG, 0.2). Train anew, or use that version"
        )
    if not is_lean(file):
        return load(policy, file, device)
    put_back(policy, file)
    return policy


# -- weights that a seed draws ---------------------------------------------------------------------------------------------


def draw(policy: Any, seed: int) -> dict[str, Tensor]:
    """The weights with which a policy of this configuration begins, when its training has this seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        weights: dict[str, Tensor] = type(policy)(policy.config).state_dict()
    return weights


def few(x: Tensor) -> Tensor:
    """Some of its numbers, from the first to the last."""
    flat = x.detach().cpu().contiguous().flatten()
    return flat[torch.linspace(0, len(flat) - 1, FEW).long()]


def leave_out(policy: Any, seed: int, file: Path) -> int:
    """Writes a policy's weights without those that are what the seed draws; returns how many numbers need not be stored."""
    begun, kept, left = draw(policy, seed), dict[str, Tensor](), 0
    for name, x in policy.state_dict().items():
        x = x.detach().cpu().contiguous()
        drawn = x.numel() > FEW and torch.equal(x, begun[name])
        kept |= {f"{SHOWN}{name}": few(x)} if drawn else {name: x}
        left += x.numel() if drawn else 0
    save_file(kept, file, {SEED: str(seed), "format": "pt"})
    return left


def is_lean(file: str | Path) -> bool:
    """Whether a file of weights has some left out."""
    with safe_open(file, "pt") as content:
        return SEED in (content.metadata() or {})


def put_back(policy: Any, file: str | Path) -> None:
    """Gives a policy the weights of a lean file, with those left out drawn again. Another version of PyTorch may draw
    others: then a CheckpointError, and the policy is as it was.
    """
    with safe_open(file, "pt") as content:
        seed = int(content.metadata()[SEED])
    stored = load_file(file)
    shown = {name.removeprefix(SHOWN): stored.pop(name) for name in list(stored) if name.startswith(SHOWN)}
    begun = draw(policy, seed) if shown else {}
    for name, x in shown.items():
        if name not in begun or not torch.allclose(few(begun[name]), x, atol=1e-6):
            raise CheckpointError(
                f"{file}: {name} was left out because seed {seed} draws it, but PyTorch {torch.__version__} draws other "
                "numbers here. Train the policy anew: the run.json beside it has the recipe"
            )
    policy.load_state_dict(stored | {name: begun[name] for name in shown})


# -- processor files -------------------------------------------------------------------------------------------------------


def check_processors(policy: str, folder: Path) -> None:
    """A CheckpointError unless both processor files of a folder hold only what such a policy's own do."""
    if policy not in STEPS:
        raise CheckpointError(f"{folder}: type: got a policy of type {policy!r}, expected one of {', '.join(STEPS)}")
    for name, allowed in STEPS[policy].items():
        content = _read(folder / name)
        if place := next(_trusting(content, ""), None):
            raise CheckpointError(f"{folder / name}: {place}: found it, expected none: nothing here runs such code")
        _known(content, ("name", "steps"), f"{folder / name}: ")
        steps = content.get("steps")
        if not isinstance(steps, list):
            raise CheckpointError(f"{folder / name}: steps: got {_short(steps)}, expected a list")
        for number, step in enumerate(steps):
            _check_step(step, allowed, folder, f"{folder / name}: step {number}: ")


def _check_step(step: Any, allowed: tuple[str, ...], folder: Path, where: str) -> None:
    if not isinstance(step, dict):
        raise CheckpointError(f"{where}got {_short(step)}, expected a table")
    if "class" in step:
        expected = f"no class, but a registry_name of {', '.join(allowed)}"
        raise CheckpointError(f"{where}class: got {_short(step['class'])}, expected {expected}")
    name, options = step.get("registry_name"), step.get("config", {})
    if name not in allowed:
        raise CheckpointError(f"{where}registry_name: got {_short(name)}, expected one of {', '.join(allowed)}")
    _known(step, ("registry_name", "config", "state_file"), where)
    if not isinstance(options, dict):
        raise CheckpointError(f"{where}config: got {_short(options)}, expected a table")
    kinds = OPTIONS[name]
    _known(options, tuple(kinds), f"{where}config.")
    if absent := [each for each in NEEDED.get(name, ()) if each not in options]:
        raise CheckpointError(f"{where}config.{absent[0]}: got none, expected {kinds[absent[0]][0]}")
    for option, value in options.items():
        words, right = kinds[option]
        if not right(value):
            raise CheckpointError(f"{where}config.{option}: got {_short(value)}, expected {words}")
    if "state_file" in step:
        file = step["state_file"]
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set("/\\\0") & set(file)
        if not plain or not (folder / file).is_file():
            expected = "the plain name of a .safetensors file in the folder"
            raise CheckpointError(f"{where}state_file: got {_short(file)}, expected {expected}")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is missing or not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: got {_short(content)}, expected a table")
    return content


def _trusting(x: Any, place: str) -> Iterator[str]:
    """Where a file asks to trust code from elsewhere."""
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in pairs:
        here = f"{place}[{key}]" if isinstance(x, list) else f"{place}.{key}".lstrip(".")
        if key == "trust_remote_code":
            yield here
        yield from _trusting(value, here)


def _known(found: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := [name for name in found if name not in known]:
        few = f"only {', '.join(known)}" if known else "none"
        raise CheckpointError(f"{where}{unknown[0]}: got {_short(found[unknown[0]])}, expected {few}")


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 100 else f"{text[:97]}..."
