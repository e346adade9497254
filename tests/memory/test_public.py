"""What a stranger meets: the public names and their examples, the package by itself, and a memory of one's own."""

import doctest
import inspect
import subprocess
import sys

import pytest
import torch

import trace_memory
from trace_errors import UsageError
from trace_memory import METHODS, Memory, MemoryConfig, Method, build, register

BLOCKED = ("lerobot", "mujoco", "ray", "huggingface_hub", "datasets", "matplotlib", "pysiglib")


def python(script: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], check=False, capture_output=True, text=True
    )


def test_there_are_about_twenty_public_names():
    assert 18 <= len(trace_memory.__all__) <= 24
    assert dir(trace_memory) == sorted(trace_memory.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recall'"):
        trace_memory.Recall  # noqa: B018


@pytest.mark.parametrize("name", [n for n in trace_memory.__all__ if n != "METHODS"])
def test_every_public_name_has_a_full_docstring_whose_example_runs(name):
    thing = getattr(trace_memory, name)
    text = inspect.getdoc(thing)
    torch.manual_seed(0)
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    if "see `save_" in text:  # the example of the one is the other's
        return
    assert test.examples, f"{name} has no example"
    assert len(test.examples) <= 7
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    if inspect.isfunction(thing) or len(inspect.signature(thing).parameters) > 0:
        assert "Args:" in text, name


def test_the_registry_and_the_options_import_no_torch():
    script = """
import sys, trace_memory.registry
from trace_memory import METHODS, MemoryConfig, PaperOptions, Method, register
MemoryConfig(name="paper", paper=PaperOptions(slots=2))
sys.exit("torch" in sys.modules)
"""
    assert python(script).returncode == 0


def test_the_package_runs_by_itself(tmp_path):
    """With nothing but torch, safetensors and jaxtyping: every memory is built, steps, scans, is saved and loaded."""
    script = """
import sys
from pathlib import Path
for name in sys.argv[2:]:
    sys.modules[name] = None
import torch
from trace_memory import METHODS, MemoryConfig, build, load_memory, load_state, save_memory, save_state
for name in METHODS:
    config, folder = MemoryConfig(name=name, channels=3, content=6, width=16, hidden=16), Path(sys.argv[1]) / name
    memory = build(config).eval()
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 40, 3).cumsum(1)
    if hasattr(memory, "normaliser"):
        memory.normaliser.fit(list(path), memory.signature)
    state, _ = memory.step(memory.init(2), contents[:, 0], path[:, 0])
    state, _ = memory.scan(contents, path[:, :9], state=state)
    memory.scan_at(contents[:, :2], path, torch.tensor([[0, 39]] * 2))
    save_memory(folder, memory, config)
    save_state(folder / "state", memory, state)
    again, found = load_memory(folder)
    assert found == config
    assert torch.equal(load_state(folder / "state", again).steps, state.steps)
"""
    done = python(script, tmp_path, *BLOCKED)
    assert done.returncode == 0, done.stderr


class Average(Memory):
    """The mean of all that was seen."""

    @property
    def shapes(self):
        return {"sum": (self.width,)}

    def _run(self, state, contents, path, valid):
        total = state.tensors["sum"][:, None] + contents[..., : self.width].cumsum(1)
        steps = state.steps[:, None] + valid.cumsum(1)
        return {"sum": total[:, -1]}, self._empty(total / steps.clamp_min(1)[..., None])


@pytest.fixture
def average():
    yield register(Method("average", Average.from_config, "average", "#000000"))
    del METHODS["average"]


def test_a_memory_of_ones_own_is_a_class_and_a_line(average):
    """docs/memories.md shows it; what is not valid comes as zeros, so it need not look at `valid`."""
    memory = build(MemoryConfig(name="average", channels=3, content=6, width=4))
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 9, 3)
    state, readouts = memory.scan(contents, path)
    torch.testing.assert_close(readouts.z[:, -1], contents[..., :4].mean(1))
    _, readout = memory.step(memory.reset(state, torch.tensor([True, False])), contents[:, 0], path[:, 0])
    torch.testing.assert_close(readout.z[0], contents[0, 0, :4])
    assert MemoryConfig(name="average").name == "average"


def test_a_name_is_given_once(average):
    with pytest.raises(UsageError, match="method 'average': is registered already"):
        register(average)
