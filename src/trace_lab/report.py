"""`tracemem report`: the tables of the README and of the docs, made from the raw episode lines under results/ and from
nothing else. A page says between two marks which tables of which results it wants; what is typed there is replaced.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from trace_lab import stats
from trace_lab.dataset import write_json
from trace_lab.lines import LineError, read
from trace_lab.tables import Table, markdown

BEGIN, END = "<!-- tracemem report {} -->", "<!-- end of report -->"
BLOCK = re.compile(r"<!-- tracemem report ([^>]+?) -->\n(.*?)<!-- end of report -->", re.DOTALL)
EARLIER = "earlier"  # in it are sets that newer ones have replaced: their tables are made, but no pictures
PICTURE = "methods.svg"
KEPT = ("evaluation.jsonl", "run.json", "evaluation.json")


class ReportError(Exception):
    """Results or a page that cannot be used; nothing was written."""


class IncompleteError(ReportError):
    """Episodes that are still to be played."""


def tables(folder: Path) -> dict[str, Table]:
    """All tables of the results in a folder."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder of results")
    return stats.report(read(folder))


def filled(page: str, where: str, root: Path) -> str:
    """A page with its blocks made anew. `where` names it in errors."""

    def fill(found: re.Match[str]) -> str:
        name, *keys = found[1].split()
        made = tables(root / name)
        if strange := [key for key in keys if key not in made]:
            raise ReportError(f"{where}: tables {', '.join(strange)} of {name}, expected some of {', '.join(made)}")
        text = markdown({key: made[key] for key in keys or made}, heading="**{}**")
        return f"{BEGIN.format(found[1])}\n{text}{END}"

    if page.count("<!-- tracemem report") != len(BLOCK.findall(page)):
        raise ReportError(f"{where}: a block that begins with {BEGIN.format('NAME')} does not end with {END}")
    return BLOCK.sub(fill, page)


def runs_of(folder: Path, place: Path, console: Console) -> list[tuple[Path, Path]]:
    """Where in the results a run goes, and the run: the folder's, or of a comparison all that have played every episode."""
    if not (folder / "compare.json").exists():
        return [(place / folder.resolve().name, folder)]
    found = []
    for run in sorted({lines.parents[2] for lines in folder.glob("*/*/*/evaluation/*/evaluation.jsonl")}):
        try:
            looked_at(run, place / run.relative_to(folder))
        except IncompleteError as error:
            console.print(f"{run}: left out ({error})", highlight=False, soft_wrap=True)
        else:
            found.append((place / run.relative_to(folder), run))
    if not found:
        raise ReportError(f"{folder}: no run of this comparison has played all of its episodes")
    return found


def looked_at(run: Path, target: Path) -> dict[Path, dict[str, Any]]:
    """What a run has to give: its episode lines with their settings. Nothing is written."""
    lines = sorted(run.glob("evaluation/*/evaluation.jsonl"))
    if not (run / "run.json").exists() or not lines:
        raise ReportError(
            f"{run}: expected run.json and evaluation/TASK/evaluation.jsonl, as train and eval write them"
        )
    if target.exists():
        raise ReportError(f"{target} is there already: remove it first, or choose another name with --to")
    found = {}
    for path in lines:
        settings: dict[str, Any] = json.loads((path.parent / KEPT[2]).read_text()).get("settings", {})
        count, asked = len(path.read_text().splitlines()), settings.get("episodes")
        if count != asked:
            raise IncompleteError(f"{path}: {count} episodes of {asked}; let tracemem eval finish them")
        settings.pop("checkpoint", None)  # a path of the machine it was made on
        found[path] = settings
    return found


def add(run: Path, target: Path, found: dict[Path, dict[str, Any]]) -> None:
    """Keeps what a trained and evaluated run says about itself: recipe and commit, settings, episode lines."""
    for path, settings in found.items():
        place = target / path.parent.name
        place.mkdir(parents=True)
        shutil.copyfile(path, place / KEPT[0])
        write_json(place / KEPT[2], {"settings": settings})
    write_json(target / KEPT[1], json.loads((run / KEPT[1]).read_text()))


def sets_of(results: Path) -> list[Path]:
    """The folders of results: those in it, and those in `earlier`."""
    return sorted(each for place in (results, results / EARLIER) for each in place.glob("*/") if each.name != EARLIER)


def draw(table: Table, path: Path) -> None:
    """The main table as a picture: progress and right first choices of every method. As text (SVG), so that it is small
    and two of them can be compared.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(table.columns)
    places, average = range(len(table.rows)), names.index("Average")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 9}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9, 1.3 + 0.3 * len(table.rows)), sharey=True, width_ratios=(3, 2), layout="constrained"
        )
        for place, row in zip(places, table.rows, strict=True):
            colour, score, firsts = "C1" if row[0].startswith("TRACE") else "C0", row[average], row[-1]
            if score is not None:
                left.barh(place, score.mean, 0.6, color=colour)
            if score is not None and score.low is not None:
                left.plot([score.low, score.high], [place, place], "|-", color="black", linewidth=1)
            if firsts is not None:
                right.barh(place, firsts[0], 0.6, color=colour)
        for number, task in enumerate(names[1:average], start=1):
            found = [(row[number].mean, place) for place, row in enumerate(table.rows) if row[number] is not None]
            left.plot(*zip(*found, strict=True), "ov^sD"[number % 5], color="0.25", markersize=3.5, label=task)
        left.set_yticks(places, [row[0] for row in table.rows])
        left.set_xlabel("progress, %: average with its 95 % interval, and each task")
        right.set_xlabel(f"{names[-1]}, %")
        left.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
        left.invert_yaxis()
        for axis in (left, right):
            axis.set_xlim(0, 102)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def report(
    results: tyro.conf.Positional[Path] = Path("results"),
    *,
    pages: tuple[Path, ...] = (),
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(name="add", metavar="RUN ...")] = (),
    to: str | None = None,
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Makes every published table anew from the raw episode lines under a folder of results.

    A page gets its tables between two marks: <!-- tracemem report signal main branches --> asks for two tables of the
    results in signal/, and <!-- end of report --> ends them. Each folder of results also gets tables.md and methods.svg.

    Args:
        results: the folder; each folder in it is one set of results, and so is each in its folder earlier.
        pages: Markdown files with such marks; README.md and all of docs/ beside the folder if not said.
        runs: first add these trained and evaluated runs to the results (with --to), or all finished ones of a comparison.
        to: name of the set they are added to, for instance signal/seed-0.
        check: write nothing; exit code 1 if a page is not what it would become.
    """
    console = Console()
    try:
        if bool(runs) != bool(to):
            raise ReportError("--add and --to go together: --add outputs/demo/seed-0/trace --to signal/seed-0")
        if check and runs:
            raise ReportError("--check writes nothing, so --add has no place beside it")
        pairs = [pair for run in runs for pair in runs_of(run, results / str(to), console)]
        targets = dict(pairs)
        if len(targets) < len(pairs):
            raise ReportError(
                f"--add: two of {', '.join(map(str, runs))} have the same name; add them to different sets"
            )
        looked = {target: looked_at(run, target) for target, run in targets.items()}
        for target, run in targets.items():
            add(run, target, looked[target])
        if not results.is_dir():
            raise ReportError(f"{results}: no such folder")
        beside = results.resolve().parent
        chosen = pages or tuple(sorted([*beside.glob("README.md"), *beside.glob("docs/**/*.md")]))
        texts = {page: page.read_text() for page in chosen}
        made = {page: filled(text, str(page), results) for page, text in texts.items()}
        sets = {folder: tables(folder) for folder in sets_of(results)}
        for folder, each in sets.items():
            page = folder / "tables.md"
            texts[page], made[page] = page.read_text() if page.exists() else "", markdown(each)
        stale = [page for page in made if made[page] != texts[page]]
        if check:
            for page in stale:
                console.print(f"{page}: its tables are not those of {results}", highlight=False, soft_wrap=True)
            return 1 if stale else 0
        for page in stale:
            page.write_text(made[page])
        for folder, each in sets.items():
            if folder.parent == results:
                draw(each["main"], folder / PICTURE)
        for page in stale:
            console.print(f"{page}: tables made anew", highlight=False, soft_wrap=True)
        console.print(
            f"{len(sets)} sets of results; {len(made) - len(stale)} pages were as they should be", highlight=False
        )
    except (ReportError, LineError, OSError, json.JSONDecodeError) as error:
        print(f"tracemem report: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
