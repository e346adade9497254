"""What the README tells people to type works: its Python runs, its commands run (made small), its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from trace_lab.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Fenced blocks marked with this language."""
    parts = README.split("```")[1::2]
    return [part.split("\n", 1)[1] for part in parts if part.split("\n", 1)[0] == language]


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code):
    scope: dict = {}
    exec(code, scope)
    assert scope["readouts"].z.shape == (2, 50, 512)
    assert scope["state"].steps.tolist() == [0, 50]


def test_there_are_commands():
    assert {"make demo", "make test", "tracemem probe"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path, capsys):
    program, name, *options = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert program == "tracemem"
    small = ["--updates", "25", "--batch", "4", "--delay", "8", "--lengths", "2", "--out", str(tmp_path)]
    assert main([name, *options, *(small if name == "probe" else [])]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
