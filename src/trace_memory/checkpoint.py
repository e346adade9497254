"""Memories and memory states as files: safetensors for numbers, JSON for words, nothing that can run code. A state file
carries the fingerprint of the memory it belongs to and is refused by any other.
"""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from trace_memory.config import MemoryConfig, build
from trace_memory.losses import AuxiliaryWeights
from trace_memory.memory import Memory, MemoryState
from trace_memory.signature import Signature


class CheckpointError(ValueError):
    """A file does not fit; the message names the file, the field, what came and what was expected."""


def fingerprint(memory: Memory) -> dict[str, str]:
    """What a state must share with the memory that continues it: kind, cells, numbers, key statistics and weights."""
    form: dict[str, dict[str, object]] = {}
    for name, module in memory.named_modules():
        parts = [module, *(v for v in vars(module).values() if isinstance(v, Signature))]
        for part in parts:
            numbers = {
                n: v for n, v in vars(part).items() if isinstance(v, int | float) and n[0] != "_" and n != "training"
            }
            form.setdefault(name, {})[type(part).__name__] = {n: str(v) for n, v in sorted(numbers.items())}
    return {
        "memory": type(memory).__name__,
        "cells": json.dumps({n: list(s) for n, s in memory.cell_shapes.items()}, sort_keys=True),
        "form": json.dumps(form, sort_keys=True),
        "statistics": _digest(dict(memory.named_buffers())),
        "weights": _digest(dict(memory.named_parameters())),
    }


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_state(path: Path, memory: Memory, state: MemoryState) -> None:
    """Writes a state, atomically."""
    tensors = {"steps": state.steps} | {f"cell.{name}": cell for name, cell in state.cells.items()}
    _save(path, {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, fingerprint(memory))


def load_state(path: Path, memory: Memory) -> MemoryState:
    """Reads a state that was saved by a memory like this one, onto this one's device."""
    device = memory.init(1).steps.device
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            found = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    for field, expected in fingerprint(memory).items():
        if found.get(field) != expected:
            raise CheckpointError(f"{path}: {field} is {found.get(field)}, expected {expected}")
    if "steps" not in tensors:
        raise CheckpointError(f"{path}: steps is missing, expected a count a row")
    return MemoryState(tensors.pop("steps"), {n.removeprefix("cell."): t for n, t in tensors.items()})


def save_memory(folder: Path, memory: Memory, config: MemoryConfig) -> None:
    """Writes config.json and model.safetensors, statistics included."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    _save(
        folder / "model.safetensors", {n: t.contiguous() for n, t in memory.state_dict().items()}, fingerprint(memory)
    )


def load_memory(folder: Path) -> tuple[Memory, MemoryConfig]:
    """Reads what save_memory wrote."""
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not readable JSON ({error})") from error
    config = config_from_dict(values, where=str(file))
    memory, weights = build(config), folder / "model.safetensors"
    try:
        memory.load_state_dict(load_file(weights))
        with safe_open(weights, framework="pt") as opened:
            found = json.loads((opened.metadata() or {}).get("form", "{}"))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{weights}: is missing or does not fit config.json: {error}") from error
    form = json.loads(fingerprint(memory)["form"])
    for name, module in memory.named_modules():  # the same weights in another form would compute something else
        if type(module).__module__.startswith("trace_memory") and found.get(name) != form[name]:
            raise CheckpointError(f"{weights}: {name or 'memory'} is {found.get(name)}, expected {form[name]}")
    return memory, config


def config_from_dict(values: dict[str, Any], where: str = "config") -> MemoryConfig:
    """A configuration from JSON; unknown fields are refused by name."""
    known = {f.name for f in fields(MemoryConfig)}
    unknown = set(values) - known
    if unknown:
        raise CheckpointError(f"{where}: unknown field {sorted(unknown)}, expected some of {sorted(known)}")
    numbers: dict[str, Any] = {n: float(v) if n in {"fade", "bound"} else v for n, v in values.items()}
    if "rates" in numbers:
        numbers["rates"] = tuple(numbers["rates"])
    if "auxiliary" in numbers:
        numbers["auxiliary"] = AuxiliaryWeights(**numbers["auxiliary"])
    return MemoryConfig(**numbers)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)
