"""What README and docs say holds: their Python runs, their links lead somewhere, their commands exist and are complete, and
they are as short as they promise. Their commands are run by tests/plugin/test_commands.py.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from printed import INCONCLUSIVE, NOT_RUN, PAGES, PROGRAMS, ROOT, SHORTER, blocks, commands
from trace_lab.cli import COMMANDS

README = (ROOT / "README.md").read_text()
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
LINKED = [*PAGES, *sorted((ROOT / "docs/decisions").glob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_read_in_five_minutes():
    assert len(README.split()) <= 1200
    assert (ROOT / "docs/pictures/demo.webp").stat().st_size < 2_000_000
    assert "docs/pictures/demo.webp" in README
    assert "docs/pictures/architecture.svg" in README


def test_decisions_are_a_page_each():
    assert len(DECISIONS) <= 12
    for page in DECISIONS:
        assert len(page.read_text().split()) <= 500, page.name
        assert page.name in (page.parent / "README.md").read_text()


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_python_of_the_readme_runs(code):
    scope: dict = {}
    exec(code, scope)
    assert scope["readouts"].z.shape == (2, 50, 512)
    assert scope["state"].steps.tolist() == [0, 50]


def test_python_of_the_suites_page_runs(capsys):
    (code,) = blocks((ROOT / "docs/suite.md").read_text(), "python")
    exec(code, {})
    assert capsys.readouterr().out == "success 1.0\n"


def test_there_are_commands():
    lines = [command.line for command in commands()]
    assert {"make demo", "make test"} <= set(lines)
    for start in ("tracemem train", "tracemem attach", "lerobot-train --policy.type=trace_act", "lerobot-eval"):
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.line)
def test_a_command_exists_and_is_complete(command):
    assert not re.search(r"\.\.\.|<\w+>", command.line), "a placeholder cannot be typed"
    program, *words = command.words
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "tracemem":
        assert words[0] in COMMANDS or words[0] == "--help"
    elif program == "lerobot-train":
        assert "--policy.push_to_hub=false" in words, "without it LeRobot asks for a place on the hub"
        assert any(word.startswith("--dataset.root=") for word in words), "without it LeRobot asks the hub for the data"


def test_no_two_commands_write_the_same_folder():
    made = [command.makes for command in commands() if command.makes and command.words[1] != "eval"]
    assert len(made) == len(set(made)), "whoever types both is refused"


def test_shortening_supplies_nothing_that_a_user_needs():
    """Whatever is appended has a default, so every command is complete as printed."""
    sizes = re.compile(r"--(steps|batch_size|num_workers|log_freq|save_freq|duration|eval\.\w+|env\.limit)=")
    networks = re.compile(r"--policy\.(dim_\w+|n_\w+|down_dims|memory\.(width|hidden))=")
    for (program, name), extra in SHORTER.items():
        if program != "tracemem":
            assert all(sizes.match(word) or networks.match(word) for word in extra.split()), extra
            continue
        module, function = getattr(COMMANDS[name], "target", COMMANDS[name]).split(":")
        parameters = inspect.signature(getattr(import_module(module), function)).parameters
        for option in re.findall(r"--([\w-]+)", extra):
            keyword = option.replace("-", "_")
            parameter = parameters.get(keyword) or parameters[f"{keyword}_"]
            assert parameter.default is not inspect.Parameter.empty, f"{name} {option}"
    assert all(program in PROGRAMS for program, _ in [*SHORTER, *NOT_RUN])
    assert set(INCONCLUSIVE) <= set(COMMANDS)


def headings(page: Path) -> set[str]:
    """As a link names them: lower case, no punctuation, hyphens for spaces. Comments in code are none."""
    text = "".join(page.read_text().split("```")[::2])
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_somewhere(page):
    text = "".join(page.read_text().split("```")[::2])
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


SOURCES = [
    path for place in ("src", "benchmarks", "examples", "tools") for path in sorted((ROOT / place).rglob("*.py"))
]


def test_decisions_and_pages_that_comments_name_exist():
    numbers = {page.name[:4] for page in DECISIONS}
    for path in SOURCES:
        text = path.read_text()
        for number in re.findall(r"decisions/(\d{4})", text):
            assert number in numbers, f"{named(path)}: decision {number}"
        for name in re.findall(r"docs/([a-z-]+\.md)", text):
            assert (ROOT / "docs" / name).exists(), f"{named(path)}: docs/{name}"
