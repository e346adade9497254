"""What the README tells people to type works: its Python runs, its commands run (made small), its links lead somewhere."""

import contextlib
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest

from trace_lab.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SUITE = (ROOT / "docs/suite.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("docs/**/*.md")])

SMALL = {
    "probe": "--updates 25 --batch 4 --delay 8 --lengths 2 --out {out}",
    "collect": "--episodes 1 --size 24 --workers 1",
    "probe-task": "--episodes 10 --size 24",
    "gallery": "--task Cable --size 40 --out {out}",
    "train": "--preset tiny --steps 1 --set episodes=1 targets=2 memory.update_every=64 --device cpu",
    "eval": "--episodes 1 --limit 3 --workers 1 --device cpu",
    "compare": "--plan-only",
    "doctor": "--preset tiny",
    "profile": "--policies act --preset tiny --sizes 32 --steps 100 --seconds 0.1 --device cpu",
}
OK = defaultdict(lambda: {0}, {"probe-task": {0, 1}})  # so few episodes prove nothing either way


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced blocks marked with this language."""
    parts = text.split("```")[1::2]
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


def run(command: str, made: Path) -> bool:
    """Whether a command of the page does what it should, when made small."""
    program, name, *options = shlex.split(command)
    assert program == "tracemem"
    extra = [word.format(out=made) for word in SMALL.get(name, "").split()]
    return main([name, *options, *extra]) in OK[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which the page's dataset, run, checkpoints and results are, whichever of its commands is tried."""
    folder = tmp_path_factory.mktemp("reader")
    with contextlib.chdir(folder):
        Path("checkpoints").symlink_to(ROOT / "checkpoints")
        signal = Path("results/signal/seed-0/trace/Signal/evaluation.jsonl")
        signal.parent.mkdir(parents=True)
        signal.write_bytes((ROOT / signal).read_bytes())
        for first in ("tracemem collect ", "tracemem train "):
            (command,) = (each for each in commands() if each.startswith(first))
            assert run(command, folder / "made")
    return folder


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, place, tmp_path, capsys):
    program, name, *_ = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    with contextlib.chdir(place):
        assert run(command, tmp_path / "made")
    assert capsys.readouterr().out


def test_commands_for_a_shell_are_those_that_plugin_tests_run():
    """tests/plugin/test_commands.py takes these from the page, word for word."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    tried = ("lerobot-train --policy.type=trace_act ", "tracemem attach ", "lerobot-train --policy.path=")
    assert [next(start for start in tried if line.startswith(start)) for line in lines] == list(tried)


def test_python_of_the_suites_page_runs(capsys):
    (code,) = blocks("python", SUITE)
    exec(code, {})
    assert capsys.readouterr().out == "success 1.0\n"


def headings(page: Path) -> set[str]:
    """As a link names them: lower case, no punctuation, hyphens for spaces. Comments in code are none."""
    text = "".join(page.read_text().split("```")[::2])
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link
