"""A checkpoint from anyone is data, not a program. LeRobot makes any class that a processor file names; here both files are
checked before it reads them. Steps, options and types are those that LeRobot and this plug-in write for the policies below.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from safetensors import SafetensorError

from trace_errors import CheckpointError

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
    """The policy's configuration, when its type is known and its processors are harmless."""
    check_processors(policy_type(folder), folder)
    return PreTrainedConfig.from_pretrained(folder, **options)


def load_processors(config: Any, folder: Path, **options: Any) -> tuple[Any, Any]:
    """The pre- and postprocessor of a checkpoint. The only place that loads them."""
    check_processors(config.type, folder)
    try:
        return make_pre_post_processors(config, pretrained_path=str(folder), **options)
    except (ValueError, TypeError, LookupError, RuntimeError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: its processors cannot be loaded. {reason}") from error


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
