"""Files: a state or a memory comes back exactly, and anything else is refused by name. Nothing unpickles."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trace_memory.checkpoint import (
    CheckpointError,
    config_from_dict,
    load_memory,
    load_state,
    save_memory,
    save_state,
)
from trace_memory.config import MEMORIES, PRESETS, MemoryConfig, build

SMALL = MemoryConfig(channels=3, content=6, width=8, hidden=8, depth=2)


def scanned(config: MemoryConfig):
    torch.manual_seed(0)
    memory = build(config).eval()
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 9, 3).cumsum(1)
    return memory, memory.scan(contents, path)[0], (contents, path)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_state_continues_from_its_file(name, tmp_path):
    memory, state, data = scanned(replace(SMALL, name=name))
    save_state(tmp_path / "state.safetensors", memory, state)
    again = load_state(tmp_path / "state.safetensors", memory)
    assert torch.equal(again.steps, state.steps)
    assert again.cells.keys() == state.cells.keys()
    assert all(torch.equal(again.cells[n], state.cells[n]) for n in state.cells)
    a, b = memory.scan(*data, state=state)[1], memory.scan(*data, state=again)[1]
    assert all(torch.equal(x, y) for x, y in zip(a[:5], b[:5], strict=True))


def test_a_memory_comes_back_with_its_statistics(tmp_path):
    config = replace(SMALL, name="trace", gate="scalar")
    memory, _, data = scanned(config)
    memory.normaliser.fit(list(data[1]), memory.signature)
    save_memory(tmp_path, memory, config)
    again, found = load_memory(tmp_path)
    assert found == config
    assert torch.equal(again.eval().scan(*data)[1].z, memory.scan(*data)[1].z)
    assert torch.equal(again.normaliser.xi_std, memory.normaliser.xi_std)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_weights_of_another_form_are_refused(tmp_path):
    """They fit in shape: a version that does not normalise keys has the same ones."""
    memory, *_ = scanned(SMALL)
    memory.keys.level = False
    save_memory(tmp_path, memory, SMALL)
    with pytest.raises(CheckpointError, match=r"keys is .*'level': 'False'.*expected .*'level': 'True'"):
        load_memory(tmp_path)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_json(preset):
    assert config_from_dict(json.loads(json.dumps(PRESETS[preset].to_dict()))) == PRESETS[preset]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(SMALL, name="gru"), "memory"),
        (replace(SMALL, slots=5), "cells"),
        (replace(SMALL, depth=3), "cells"),
        (replace(SMALL, fade=4.0), "form"),
        (replace(SMALL, tau=0.5), "form"),
        (replace(SMALL, name="unrouted"), "form"),
        (SMALL, "weights"),  # the same form, drawn anew
    ],
)
def test_a_state_of_another_configuration_is_refused(other, field, tmp_path):
    memory, state, _ = scanned(SMALL)
    save_state(tmp_path / "s", memory, state)
    with pytest.raises(CheckpointError, match=f"{field} is"):
        load_state(tmp_path / "s", build(other))


def test_a_state_under_other_statistics_is_refused(tmp_path):
    memory, state, data = scanned(SMALL)
    save_state(tmp_path / "s", memory, state)
    memory.normaliser.fit(list(data[1]), memory.signature)
    with pytest.raises(CheckpointError, match="statistics is"):
        load_state(tmp_path / "s", memory)


def test_statistics_of_another_signature_are_refused(tmp_path):
    config = replace(SMALL, name="signature-only")
    memory, _, _ = scanned(config)
    save_memory(tmp_path, memory, config)
    values = config.to_dict() | {"depth": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"normaliser\.xi_mean"):
        load_memory(tmp_path)


def test_junk_is_refused(tmp_path):
    (tmp_path / "s").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_state(tmp_path / "s", build(SMALL))
    with pytest.raises(CheckpointError, match="not a readable"):
        load_state(tmp_path / "absent", build(SMALL))
    with pytest.raises(CheckpointError, match=r"config\.json: not readable JSON"):
        load_memory(tmp_path)
    with pytest.raises(CheckpointError, match=r"unknown field \['slotz'\]"):
        config_from_dict({"slotz": 3})


def test_nothing_in_the_library_unpickles():
    source = Path(__file__).parents[2] / "src"
    for file in source.rglob("*.py"):
        text = file.read_text()
        assert not any(word in text for word in ("torch.load(", "import pickle", "allow_pickle=True")), file
