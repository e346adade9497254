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

from trace_errors import CheckpointError, UsageError
from trace_memory.config import RENAMED, MemoryConfig, PaperOptions, build, nearest
from trace_memory.memory import Memory, MemoryState
from trace_memory.signature import Signature


def fingerprint(memory: Memory) -> dict[str, str]:
    """What a state must share with the memory that continues it: kind, shapes, numbers, key statistics and weights."""
    return {
        "memory": type(memory).__name__,
        "tensors": json.dumps({n: list(s) for n, s in memory.shapes.items()}, sort_keys=True),
        "form": json.dumps(_form(memory), sort_keys=True),
        "statistics": _digest(dict(memory.named_buffers())),
        "weights": _digest(dict(memory.named_parameters())),
    }


def _form(memory: Memory) -> dict[str, dict[str, dict[str, str]]]:
    """The kind of every part, and the numbers of those that are ours."""
    form: dict[str, dict[str, dict[str, str]]] = {}
    for name, module in memory.named_modules():
        for part in (module, *(v for v in vars(module).values() if isinstance(v, Signature))):
            ours = type(part).__module__.startswith("trace_memory")
            numbers = (
                {n: v for n, v in vars(part).items() if isinstance(v, int | float) and n[0] != "_"} if ours else {}
            )
            form.setdefault(name, {})[type(part).__name__] = {
                n: str(v) for n, v in sorted(numbers.items()) if n != "training"
            }
    return form


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_state(path: Path, memory: Memory, state: MemoryState) -> None:
    """Writes a state to a safetensors file, atomically.

    Args:
        path: the file.
        memory: the memory that the state is of.
        state: what to write.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from trace_memory import MemoryConfig, build, load_state, save_state
        >>> memory, file = build(MemoryConfig(name="gru", content=64, width=32)), Path(tempfile.mkdtemp()) / "state"
        >>> save_state(file, memory, memory.init(2))
        >>> load_state(file, memory).steps.tolist()
        [0, 0]
    """
    tensors = {"steps": state.steps} | {f"tensor.{name}": x for name, x in state.tensors.items()}
    _save(path, {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, fingerprint(memory))


def load_state(path: Path, memory: Memory) -> MemoryState:
    """Reads a state that was saved by a memory like this one.

    Args:
        path: what `save_state` wrote.
        memory: the memory that goes on from it.

    Returns:
        The state, on the memory's device.

    Raises:
        CheckpointError: the file cannot be read, or is of another memory; the message says in what it differs.

    Example: see `save_state`.
    """
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
    return MemoryState(tensors.pop("steps"), {n.removeprefix("tensor."): t for n, t in tensors.items()})


def save_memory(folder: Path, memory: Memory, config: MemoryConfig) -> None:
    """Writes a memory: config.json and model.safetensors, statistics included.

    Args:
        folder: made if it is not there.
        memory: what to write.
        config: what it was built from.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from trace_memory import MemoryConfig, build, load_memory, save_memory
        >>> config, folder = MemoryConfig(name="gru", content=64, width=32), Path(tempfile.mkdtemp())
        >>> save_memory(folder, build(config), config)
        >>> load_memory(folder)[1] == config
        True
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    _save(
        folder / "model.safetensors", {n: t.contiguous() for n, t in memory.state_dict().items()}, fingerprint(memory)
    )


def load_memory(folder: Path) -> tuple[Memory, MemoryConfig]:
    """Reads a memory.

    Args:
        folder: what `save_memory` wrote.

    Returns:
        The memory, in training mode on the CPU, and what it was built from.

    Raises:
        CheckpointError: a file cannot be read, or does not fit; the message names it and the field.

    Example: see `save_memory`.
    """
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
    for name, form in _form(memory).items():  # the same weights in another form would compute something else
        if found.get(name) != form:
            raise CheckpointError(f"{weights}: {name or 'memory'} is {found.get(name)}, expected {form}")
    return memory, config


def config_from_dict(values: dict[str, Any], where: str = "config") -> MemoryConfig:
    """A configuration from JSON. Unknown fields are refused by name, old ones with the new name.

    Args:
        values: what `MemoryConfig.to_dict` gave.
        where: what error messages begin with.

    Returns:
        The configuration.

    Raises:
        CheckpointError: a field is not known, or its value makes no sense.
    """
    made: dict[str, Any] = _known(values, MemoryConfig, where)
    made |= {name: tuple(made[name]) for name in ("velocity_channels", "map") if isinstance(made.get(name), list)}
    try:
        if "paper" in made:
            made["paper"] = PaperOptions(**_known(made["paper"], PaperOptions, f"{where}: paper"))
        return MemoryConfig(**made)
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _known(values: Any, kind: type[MemoryConfig] | type[PaperOptions], where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: {values!r}, expected fields and their values")
    known = {f.name for f in fields(kind)}
    for name in values:
        if name not in known and name in RENAMED:
            raise CheckpointError(f"{where}: {name} {RENAMED[name]}")
        if name not in known:
            raise CheckpointError(f"{where}: unknown field {name!r}, {nearest(name, sorted(known))}")
    return dict(values)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)
