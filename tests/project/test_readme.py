"""What README and docs say holds: their Python runs, their links lead somewhere, the files they name are there, their
commands exist and are complete, and they are as short as they promise. tests/plugin/test_commands.py runs the commands.
"""

import inspect
import re
import subprocess
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
    elif program == "python":
        script = (ROOT / words[0]).read_text()
        for option in re.findall(r"--(\S+)", " ".join(words[1:])):
            assert re.search(rf"\b{option}\b", script), option
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
    networks = re.compile(r"--policy\.(dim_\w+|n_\w+|memory\.(width|hidden))=")
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
    for rule in SHORTER:
        assert any(command.matching({rule: True}) for command in commands()), f"{rule}: no such command is printed"
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


WRITTEN = {  # by commands, or by whoever follows the page: these are not ours
    "run.json", "metrics.jsonl", "curves.png", "checkpoints/last/pretrained_model", "model.safetensors", ".offline/",
    "site.tar.xz", "lib/", "src/trace_bench/tasks/mine.py",
}  # fmt: skip
NO_FILES = re.compile(r"trace_bench/\w+-v\d+")  # environments
FILE = re.compile(r"[\w./-]+/[\w./-]*|[\w.-]+\.(?:py|md|sh|toml|lock|jsonl?|parquet|svg|png|webp|cff|safetensors|xz)")


def missing(text: str, page: Path) -> list[str]:
    """Files and folders that a page names in backticks and that are not there. What a line says is at a commit is looked
    for in the commits of that line, where the history is at hand.
    """
    found = []
    for line in "".join(text.split("```")[::2]).splitlines():
        for name in re.findall(r"`([^`]+)`", line):
            if not FILE.fullmatch(name) or NO_FILES.fullmatch(name) or name in WRITTEN:
                continue
            places = [place / name for place in (ROOT, ROOT / "src", page.parent)]
            commits = re.findall(r"\b[0-9a-f]{7}\b", line)
            if not any(place.exists() for place in places) and not (commits and kept(name, commits)):
                found.append(name)
    return found


def kept(name: str, commits: list[str]) -> bool:
    """Whether one of these commits has a file; without the whole history nobody can tell."""
    git = ["git", "-C", str(ROOT)]
    whole = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if whole.stdout.strip() != "false":
        return True
    return any(
        subprocess.run([*git, "cat-file", "-e", f"{c}:{name}"], capture_output=True).returncode == 0 for c in commits
    )


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_files_that_a_page_names_are_there(page):
    assert not missing(page.read_text(), page)


def test_a_file_that_is_not_there_is_found():
    text = "See `docs/maths.md`, `docs/history.md`, `suite.py` and `by_heart.py`; `a / b` is no file, `no/` is one."
    assert missing(text, ROOT / "benchmarks/README.md") == ["docs/history.md", "by_heart.py", "no/"]
    assert not missing("`docs/history.md` at commit de7fadf", ROOT / "README.md")
    assert all(any(f"`{name}`" in page.read_text() for page in LINKED) for name in WRITTEN), "an exception nobody needs"
    if kept("docs/history.md", ["c3fceae"]) and not kept("docs/history.md", []):
        assert missing("`docs/no.md` at commit de7fadf", ROOT / "README.md") == ["docs/no.md"]


def test_every_benchmark_is_described_with_its_command():
    page = (ROOT / "benchmarks/README.md").read_text()
    (code,) = blocks(page, "sh")
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        assert f"| `{script.name}` |" in page, script.name
        assert f"python benchmarks/{script.name}" in code, script.name


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
