"""`tracemem report`: the tables of the README and of the docs, made from the sets under results/ and from nothing else. A
page says between two marks which tables of which set it wants; what is typed there is replaced.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from trace_errors import RunError, UsageError
from trace_lab.results import label, manifest, manifest_of, read, sets_in, whole, write
from trace_lab.tables import Table, draw, markdown
from trace_lab.tables import report as tables_of

BEGIN, END = "<!-- tracemem report {} -->", "<!-- end of report -->"
BLOCK = re.compile(r"<!-- tracemem report ([^>]+?) -->\n(.*?)<!-- end of report -->", re.DOTALL)
COMPARED = "results.parquet"  # what a comparison leaves


def set_of(name: str, folder: Path) -> Path:
    """The file of a published set."""
    if not (file := folder / f"{name}.parquet").exists():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.parquet"))) or "none"
        raise RunError(f"{name}: no such set in {folder}, expected one of {known}")
    return file


def tables(name: str, folder: Path, methods: tuple[str, ...] = ()) -> dict[str, Table]:
    """All tables of a set; of some of its methods only the rows, whose numbers stay what they are in the whole set."""
    reading = read(set_of(name, folder))
    made = tables_of(reading)
    if not methods:
        return made
    chosen = {(policy, memory or "none") for policy, _, memory in (each.partition("+") for each in methods)}
    met = {each.method for each in reading.rollouts}
    if strange := ["+".join(each) for each in sorted(chosen - met)]:
        known = ", ".join(map("+".join, sorted(met)))
        raise RunError(f"{name}: of: got {', '.join(strange)}, expected some of {known}")
    shown, others = {label(each) for each in chosen}, tuple(f"{label(each)}: " for each in met - chosen)
    some = f"{len(chosen)} of the set's {len(met)} methods are shown."
    return {
        key: replace(
            table,
            rows=[row for row in table.rows if row[0] in shown],
            notes=(table.notes[0], some, *(note for note in table.notes[1:] if not note.startswith(others))),
        )
        for key, table in made.items()
    }


def filled(page: str, where: str, folder: Path, known: dict[str, dict[str, Table]]) -> str:
    """A page with its blocks made anew. `where` names it in errors; `known` keeps tables for the next page."""

    def fill(found: re.Match[str]) -> str:
        words, _, methods = found[1].partition(" of ")
        name, *keys = words.split()
        asked = f"{name} of {methods}"
        made = known[asked] = known.get(asked) or tables(name, folder, tuple(methods.split()))
        if strange := [key for key in keys if key not in made]:
            raise RunError(f"{where}: tables {', '.join(strange)} of {name}, expected some of {', '.join(made)}")
        text = markdown({key: made[key] for key in keys or made}, heading="**{}**")
        return f"{BEGIN.format(found[1])}\n{text}{END}"

    if page.count("<!-- tracemem report") != len(BLOCK.findall(page)):
        raise RunError(f"{where}: a block that begins with {BEGIN.format('NAME')} does not end with {END}")
    return BLOCK.sub(fill, page)


def add(places: tuple[Path, ...], file: Path, decides: str, console: Console) -> None:
    """Keeps a finished comparison, or trained and evaluated runs, as a set. What is kept already stays."""
    if file.exists():
        raise RunError(f"{file} is there already: remove it first, or choose another name with --to")
    if absent := [each for each in places if not each.is_dir()]:
        raise RunError(f"--add: got {absent[0]}, expected a folder of tracemem compare, train or demo")
    if len(places) == 1 and (made := places[0] / COMPARED).exists():
        facts = manifest(made) | ({"decides": decides} if decides else {})
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, file)
        manifest_of(file).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        for each in facts.get("unfinished", []):
            console.print(f"not in it, because not finished: {each}", highlight=False, soft_wrap=True)
        return
    reading = whole(*places)
    for note in reading.notes:
        console.print(note, highlight=False, soft_wrap=True)
    if not reading.rollouts:
        raise RunError(f"{', '.join(map(str, places))}: no run there has played all of its episodes")
    write(file, reading.rollouts, decides=decides)


def report(
    results: tyro.conf.Positional[Path] = Path("results"),
    *,
    pages: tuple[Path, ...] = (),
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(name="add", metavar="OUT ...")] = (),
    to: str | None = None,
    decides: str = "",
    show: str | None = None,
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Makes every published table anew from the sets under a folder of results.

    A page gets its tables between two marks: <!-- tracemem report signal main branches --> asks for two tables of the set
    signal, <!-- tracemem report suite main of act act+trace --> for one of two methods, and <!-- end of report --> ends
    them. A set of which a page shows the picture (results/NAME.svg) also gets it.

    Args:
        results: the folder; each NAME.parquet in it, with its manifest NAME.json, is a set.
        pages: Markdown files with such marks; README.md and all of docs/ beside the folder if not said.
        runs: first keep this comparison, or these trained and evaluated runs, as a set (with --to).
        to: the name of the set.
        decides: what the set decides, for its manifest.
        show: print all tables of this set, and write nothing.
        check: write nothing; exit code 1 if a page is not what it would become.
    """
    console = Console()
    if bool(runs) != bool(to):
        raise UsageError("--add and --to go together: --add outputs/compare --to suite")
    if (check or show) and runs:
        raise UsageError("--check and --show write nothing, so --add has no place beside them")
    if to and Path(to).name != to:
        raise UsageError(f"--to: got {to}, expected a name without folders")
    if show:
        console.print(markdown(tables(show, results)), markup=False, highlight=False, soft_wrap=True)
        return 0
    if runs:
        add(runs, results / f"{to}.parquet", decides, console)
    if not results.is_dir():
        raise RunError(f"{results}: no such folder")
    beside = results.resolve().parent
    chosen = pages or tuple(sorted([*beside.glob("README.md"), *beside.glob("docs/**/*.md")]))
    if absent := [page for page in chosen if not page.is_file()]:
        raise UsageError(f"--pages: got {absent[0]}, expected a file")
    texts = {page: page.read_text() for page in chosen}
    known: dict[str, dict[str, Table]] = {}
    made = {page: filled(text, str(page), results, known) for page, text in texts.items()}
    files = sets_in(results)
    readings = {file: read(file) for file in files}
    stale = [page for page in made if made[page] != texts[page]]
    if check:
        for page in stale:
            console.print(f"{page}: its tables are not those of {results}", highlight=False, soft_wrap=True)
        return 1 if stale else 0
    for page in stale:
        page.write_text(made[page])
        console.print(f"{page}: tables made anew", highlight=False, soft_wrap=True)
    for file, reading in readings.items():
        if any(f"results/{file.stem}.svg" in text for text in texts.values()):
            draw(reading, file.with_suffix(".svg"))
    console.print(
        f"{len(files)} sets of results; {len(made) - len(stale)} pages were as they should be", highlight=False
    )
    return 0
