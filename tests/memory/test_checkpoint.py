"""Files: a state or a memory comes back exactly, and anything else is refused by name. Nothing unpickles."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trace_errors import CheckpointError
from trace_memory.checkpoint import (
    config_from_dict,
    load_memory,
    load_state,
    save_memory,
    save_state,
)
from trace_memory.config import RENAMED, MemoryConfig, PaperOptions, build
from trace_memory.registry import METHODS

SMALL = MemoryConfig(channels=3, content=6, width=8, hidden=8)
PAPER = replace(SMALL, name="paper")


def scanned(config: MemoryConfig):
    torch.manual_seed(0)
    memory = build(config).eval()
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 9, 3).cumsum(1)
    return memory, memory.scan(contents, path)[0], (contents, path)


@pytest.mark.parametrize("name", METHODS)
def test_a_state_continues_from_its_file(name, tmp_path):
    memory, state, data = scanned(replace(SMALL, name=name))
    save_state(tmp_path / "state.safetensors", memory, state)
    again = load_state(tmp_path / "state.safetensors", memory)
    assert torch.equal(again.steps, state.steps)
    assert again.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(again.tensors[n], state.tensors[n]) for n in state.tensors)
    a, b = memory.scan(*data, state=state)[1], memory.scan(*data, state=again)[1]
    assert all(torch.equal(x, y) for x, y in zip(a[:5], b[:5], strict=True))


def test_a_memory_comes_back_with_its_statistics(tmp_path):
    config = replace(PAPER, paper=PaperOptions(slots=3))
    memory, _, data = scanned(config)
    memory.normaliser.fit(list(data[1]), memory.signature)
    save_memory(tmp_path, memory, config)
    again, found = load_memory(tmp_path)
    assert found == config
    assert torch.equal(again.eval().scan(*data)[1].z, memory.scan(*data)[1].z)
    assert torch.equal(again.normaliser.xi_std, memory.normaliser.xi_std)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_weights_of_another_form_are_refused(tmp_path):
    """They fit in shape: keys that are normalised have the same ones, and so has another way to read."""
    memory, *_ = scanned(PAPER)
    memory.keys.norm = torch.nn.LayerNorm(8, elementwise_affine=False)
    save_memory(tmp_path, memory, PAPER)
    with pytest.raises(CheckpointError, match=r"keys\.norm is .*LayerNorm.*expected .*Identity"):
        load_memory(tmp_path)
    memory, *_ = scanned(replace(SMALL, name="mean-read"))
    save_memory(tmp_path, memory, SMALL)
    with pytest.raises(CheckpointError, match=r"slots\.alpha is .*MeanRead.*expected .*AttentionRead"):
        load_memory(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        MemoryConfig(velocity_channels=(0, 3)),
        MemoryConfig(name="paper", paper=PaperOptions(slots=6, log_signature=True, anchor=True, balance=0.0)),
    ],
)
def test_configurations_survive_json(config):
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_option_is_refused_with_the_new_one(name):
    with pytest.raises(CheckpointError, match=rf"config: {name} is (now|not an option any more)"):
        config_from_dict(SMALL.to_dict() | {name: 1})


def test_what_stands_in_place_of_old_options_is_there():
    for sentence in RENAMED.values():
        for new in [word for word in sentence.replace(",", "").split() if word.startswith("paper.")]:
            assert hasattr(PaperOptions(), new.removeprefix("paper.")), new
    assert "velocity_channels" in RENAMED["rates"]


@pytest.mark.parametrize(
    ("kept", "other", "field"),
    [
        (SMALL, replace(SMALL, name="gru"), "memory"),
        (SMALL, replace(SMALL, name="paper"), "memory"),
        (SMALL, replace(SMALL, width=9), "tensors"),
        (PAPER, replace(PAPER, paper=PaperOptions(slots=5)), "tensors"),
        (PAPER, replace(PAPER, paper=PaperOptions(depth=2)), "tensors"),
        (PAPER, replace(PAPER, paper=PaperOptions(log_signature=True)), "form"),
        (PAPER, replace(PAPER, paper=PaperOptions(tau=0.5)), "form"),
        (PAPER, replace(PAPER, paper=PaperOptions(identity=0.4)), "form"),
        (SMALL, replace(SMALL, name="unrouted"), "form"),
        (SMALL, replace(SMALL, velocity_channels=(1,)), "statistics"),
        (SMALL, SMALL, "weights"),  # the same form, drawn anew
    ],
)
def test_a_state_of_another_configuration_is_refused(kept, other, field, tmp_path):
    memory, state, _ = scanned(kept)
    save_state(tmp_path / "s", memory, state)
    with pytest.raises(CheckpointError, match=f"{field} is"):
        load_state(tmp_path / "s", build(other))


def test_a_signature_that_fades_otherwise_is_another_form(tmp_path):
    memory, state, _ = scanned(SMALL)
    save_state(tmp_path / "s", memory, state)
    memory.signature.fade = 4.0
    with pytest.raises(CheckpointError, match="form is"):
        load_state(tmp_path / "s", memory)


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
    values = config.to_dict() | {"channels": 4}
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
    with pytest.raises(CheckpointError, match="unknown field 'chanels', did you mean 'channels'"):
        config_from_dict({"chanels": 3})
    with pytest.raises(CheckpointError, match="paper: unknown field 'slotz', did you mean 'slots'"):
        config_from_dict({"name": "paper", "paper": {"slotz": 3}})
    with pytest.raises(CheckpointError, match="config: memory width: 0"):
        config_from_dict({"width": 0})


def test_nothing_in_the_library_unpickles():
    source = Path(__file__).parents[2] / "src"
    for file in source.rglob("*.py"):
        text = file.read_text()
        assert not any(word in text for word in ("torch.load(", "import pickle", "allow_pickle=True")), file
