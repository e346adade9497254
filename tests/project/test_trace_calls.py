"""The drawings of one update and one control step in docs/concepts.md are those of today's code."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("trace_calls", ROOT / "tools" / "trace_calls.py")
    module = sys.modules["trace_calls"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trace_calls"]


def test_the_page_shows_what_is_passed(tool, dataset):
    """If not: python tools/trace_calls.py."""
    page = tool.PAGE.read_text()
    assert tool.written(page, tool.blocks(dataset)) == page


def test_a_page_without_marks_is_refused(tool):
    with pytest.raises(SystemExit, match="trace_calls step --> stands there 0 times, expected once"):
        tool.written("", {"step": "```text\n```"})


def test_calls_are_drawn_below_whom_they_come_from(tool):
    from trace_memory.config import MemoryConfig, build
    from trace_memory.registry import METHODS

    METHODS["none"].load()
    lines = tool.drawn(tool.traced(lambda: build(MemoryConfig(name="none")))).splitlines()
    assert lines[1].startswith("3 modules")
    assert [line.lstrip("│├└─ ").split()[:2] for line in lines[2:5]] == [
        ["trace_memory.config", "MemoryConfig"],
        ["trace_memory.registry", "Method.load"],
        ["trace_memory.memory", "Memory.from_config"],
    ]
    assert [line[0] for line in lines[2:5]] == ["t", "├", "└"]
