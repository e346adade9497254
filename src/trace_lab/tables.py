"""Tables of results: rows of values under headings that know how a value reads, as Markdown and as JSON; and the figure of
the methods. The numbers are made by `stats`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trace_bench.tasks import of_suite
from trace_lab import stats
from trace_lab.recipe import POLICIES
from trace_lab.results import Method, Reading, label
from trace_lab.stats import FIRST, NONE_WRONG, REACHED, Cells, Estimate, Study
from trace_memory.registry import METHODS

DASH = "—"
type Show = Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """Rows of values under headings that know how a value reads; None is missing. The first note is the caption."""

    title: str
    columns: dict[str, Show]
    rows: list[tuple[Any, ...]]
    notes: tuple[str, ...] = ()
    bold: tuple[str, ...] = ()  # columns whose largest mean is


def markdown(tables: dict[str, Table], heading: str = "## {}") -> str:
    """The tables as Markdown: the best of a column bold, caption and notes below."""
    blocks = []
    for table in tables.values():
        shows, headings = table.columns.values(), list(table.columns)
        grid = [[DASH if v is None else show(v) for show, v in zip(shows, row, strict=True)] for row in table.rows]
        for index in map(headings.index, table.bold):
            means = {number: row[index].mean for number, row in enumerate(table.rows) if row[index] is not None}
            for number in (n for n, mean in means.items() if mean > max(means.values()) - 1e-9):
                grid[number][index] = f"**{grid[number][index]}**"
        lines = [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *grid)]
        blocks += [heading.format(table.title), *(["\n".join(lines)] if grid else []), *table.notes]
    return "\n\n".join(blocks) + "\n"


def to_json(tables: dict[str, Table]) -> dict[str, Any]:
    """The same as plain values: title, rows by heading and notes of each table."""
    whole = {}
    for key, table in tables.items():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        whole[key] = {"title": table.title, "rows": rows, "notes": table.notes}
    return dict(json.loads(json.dumps(whole, default=asdict)))  # tuples become lists


# -- how values read -------------------------------------------------------------------------------------------------------

COUNTED: Show = "{0.count} ({0.percent:.0f} %)".format
COUNTED_OF: Show = "{0.count} of {0.of} ({0.percent:.0f} %)".format
RATE: Show = "{0.percent:.1f} [{0.low:.1f}, {0.high:.1f}] ({0.count}/{0.of})".format
BALANCED: Show = "{0.percent:.1f} ({0.count}/{0.of})".format


def _score(value: Estimate, digits: int = 1) -> str:
    return f"{value.mean:.{digits}f} ± {DASH if value.se is None else f'{value.se:.{digits}f}'}"


def _interval(value: Estimate, digits: int = 2) -> str:
    return DASH if value.low is None else f"[{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _signed(value: Estimate) -> str:
    return f"{value.mean:+.1f} {_interval(value, 1)}"


def _paired(value: tuple[Estimate, int]) -> str:
    return f"{value[0].mean:+z.1f} {_interval(value[0], 1)} ({value[1]})"


# -- the tables ------------------------------------------------------------------------------------------------------------


def _missing(methods: Mapping[Method, Cells], tasks: Sequence[str]) -> Iterator[str]:
    suite = of_suite()
    if 0 < len(absent := [task for task in suite if task not in tasks]) < len(suite):
        yield f"Averages are over {len(tasks)} of the suite's {len(suite)} tasks; no rollouts of {', '.join(absent)}."
    for method, own in methods.items():
        seeds = {seed for task in own.values() for seed in task}
        lacking = [task for task in tasks if task not in own]
        lacking += [f"{task} with training seed {s}" for task in own for s in sorted(seeds - set(own[task]))]
        if lacking:
            no_average = ", hence no average" if len(own) < len(tasks) else ""
            yield f"{label(method)}: no rollouts of {', '.join(lacking)}{no_average}."


def _averages(title: str, study: Study, over: Mapping[str, Sequence[str]], show: Show) -> Table:
    """Under each heading, every method's average over these tasks."""
    rows = [(label(m), *(stats.average(own, some) for some in over.values())) for m, own in study.methods.items()]
    return Table(title, {"Method": str} | dict.fromkeys(over, show), rows, bold=tuple(over))


def _beside(table: Table, heading: str, show: Show, values: Sequence[Any]) -> Table:
    """A table with one column more."""
    rows = [(*row, value) for row, value in zip(table.rows, values, strict=True)]
    return replace(table, columns=table.columns | {heading: show}, rows=rows)


def _main(study: Study) -> Table:
    over = {task: [task] for task in study.tasks} | {"Average": study.tasks}
    table = _averages("Main results: mean stage progress (%) ± SE", study, over, _score)
    spreads = [stats.seed_spread(own, study.tasks) for own in study.methods.values()]
    if any(spread is not None for spread in spreads):
        table = _beside(table, "SD over training seeds", "{:.1f}".format, spreads)
    by_chance = "" if study.guess is None else f" (chance: {study.guess:.1f})"
    return _beside(table, f"{FIRST}{by_chance}", BALANCED, [study.firsts(method) for method in study.methods])


def _summary(study: Study) -> Table:
    by_chance = "" if study.guess is None else f" (chance: {study.guess:.1f})"
    table = _averages("Progress (%) ± SE", study, {"Average progress": study.tasks}, _score)
    table = _beside(table, f"{FIRST}{by_chance}", BALANCED, [study.firsts(method) for method in study.methods])
    return _beside(table, "Trainings", str, [len(study.trainings[method]) for method in study.methods])


def _leave_one_out(study: Study) -> Table:
    over = {"All tasks": study.tasks}
    over |= {f"Drop {task}": [other for other in study.tasks if other != task] for task in study.tasks}
    return _averages("Leave-one-task-out averages (%)", study, over, "{0.mean:.2f}".format)


def _tool(study: Study, reference: Method | None) -> Table:
    title, rest = "Tool, and averages without it (%)", [task for task in study.tasks if task != "Tool"]
    if "Tool" not in study.tasks:
        return Table(title, {}, [], ("Left out: there are no Tool rollouts.",))
    dropped = {method: stats.average(own, rest) for method, own in study.methods.items()}
    ours = [memory for memory, each in METHODS.items() if each.kind in {"trace", "ablation"}]
    against = reference or stats.best_other(dropped, ours)
    columns: dict[str, Show] = {
        "Method": str,
        "Tool mean ± SE": lambda v: _score(v, 2),
        "Tool 95 % interval": _interval,
        "Drop-Tool average": lambda v: f"{v.mean:.2f} {_interval(v)}",
        f"Drop-Tool gap vs. {label(against) if against else DASH}": lambda v: f"{v.mean:+.2f} {_interval(v)}",
    }
    all_ = study.methods
    gaps = {m: stats.difference(own, all_[against], rest) for m, own in all_.items() if against and m != against}
    rows = [(label(m), *[stats.average(own, ["Tool"])] * 2, dropped[m], gaps.get(m)) for m, own in all_.items()]
    return Table(title, columns, rows)


def _failures(study: Study) -> Table:
    rows = [(label(method), task, *stats.failures(some).values()) for (method, task), some in study.sheets.items()]
    columns: dict[str, Show] = {"Method": str, "Task": str} | dict.fromkeys(stats.failures([]), COUNTED)
    return Table("Failure taxonomy: rollouts (share)", columns, rows)


def _branches(study: Study) -> Table:
    rows: list[tuple[Any, ...]] = [
        (label(method), task, study.guesses[task], *stats.branches(some).values())
        for (method, task), some in study.sheets.items()
    ]
    columns: dict[str, Show] = {"Method": str, "Task": str, "Chance": "{:.1f}".format}
    rates = dict.fromkeys((FIRST, REACHED, NONE_WRONG), RATE)
    return Table("Branch accuracy (%) with Wilson 95 % intervals", columns | rates, rows)


def _waits(study: Study, *, by_task: bool) -> Table:
    rows: list[tuple[Any, ...]] = [
        (label(each.method), each.tasks[0] if len(each.tasks) == 1 else "all", *each.progress, *each.in_time)
        for each in stats.waiting(study)
        if by_task or list(each.tasks) == study.tasks
    ]
    shows = dict.fromkeys(("Progress, shorter waits", "longest quarter"), "{:.1f}".format)
    counts = dict.fromkeys(("Lamp in time, shorter waits", "in time, longest quarter"), COUNTED_OF)
    title = "Waiting for the first lamp: mean progress (%), and rollouts in which it lights in time"
    return Table(title, {"Method": str, "Task": str, **shows, **counts}, rows)


def _leads(study: Study) -> Table | None:
    found = stats.leads(study)
    if all(each.more is None for each in found):
        return None
    rows = [(label(x.method), x.average, x.trainings, x.more, x.apart, x.over_trainings) for x in found]
    columns: dict[str, Show] = {
        "Method": str,
        "Average": lambda v: f"{v.mean:.1f} {_interval(v, 1)}",
        "Whole trainings": str,
        "TRACE's lead": _signed,
        "Intervals apart": lambda v: "yes" if v else "no",
        "Lead over trainings": _signed,
    }
    note = (
        "Intervals tell how sure one can be about these trainings, by drawing their rollouts anew. The last column tells "
        "how sure one can be about others: Welch's interval over whole trainings, of which both must have two."
    )
    return Table("Average progress (%) with 95 % intervals, and TRACE's lead", columns, rows, (note,))


def _pairs(study: Study) -> Table | None:
    rows = [(label(x.method), (x.progress, x.count), x.firsts and (x.firsts, x.decided)) for x in stats.pairs(study)]
    title = "TRACE's lead (points), pair by pair: trainings with the same seed and the same start"
    note = "Means with Student's 95 % interval and, in brackets, the number of pairs."
    columns: dict[str, Show] = {"TRACE against": str, "Progress": _paired, FIRST: _paired}
    return Table(title, columns, rows, (note,)) if rows else None


def _cues(study: Study) -> Table | None:
    rows = [(label(x.method), x.task, x.whole, x.alike, x.right) for x in stats.cue_choices(study)]
    names = ("A choice with every cue", "the same whatever the cue", "right with every cue")
    title = "Scenes played with every cue: does the first choice change with it?"
    return Table(title, {"Method": str, "Task": str} | dict.fromkeys(names, COUNTED_OF), rows) if rows else None


def _span(numbers: Iterable[int]) -> str:
    each = sorted(set(numbers))
    return str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}"


def _caption(study: Study) -> str:
    all_ = study.methods.values()
    sizes = _span(len(sample) for own in all_ for seeds in own.values() for sample in seeds.values())
    trained = _span(len({seed for seeds in own.values() for seed in seeds}) for own in all_)
    return (
        f"{len(study.rollouts)} rollouts: {sizes} a method, task and training seed. Training seeds a method: {trained}. "
        f"Split: {', '.join(sorted({each.record.split for each in study.rollouts}))}."
    )


def report(reading: Reading, reference: Method | None = None) -> dict[str, Table]:
    """All tables by key; what was left out in reading is noted under the first.

    Args:
        reading: of one set, or of a comparison.
        reference: the drop-Tool gap is against this method, or else against the one with the best drop-Tool average that is
            neither TRACE nor a part of it.

    Raises:
        ValueError: there are no rollouts, or none of the reference.
    """
    study = Study(reading.rollouts)
    if reference not in {None, *study.methods}:
        raise ValueError(f"reference: got {reference}, expected one of {list(study.methods)}")
    tables = {
        "main": _main(study),
        "summary": _summary(study),
        "leave_one_task_out": _leave_one_out(study),
        "tool": _tool(study, reference),
        "failures": _failures(study),
        "branches": _branches(study),
        "waits": _waits(study, by_task=False),
        "waits_by_task": _waits(study, by_task=True),
        **{
            key: table
            for key, table in {"leads": _leads(study), "pairs": _pairs(study), "cues": _cues(study)}.items()
            if table
        },
    }
    notes = (*_missing(study.methods, study.tasks), *reading.notes)
    tables["main"] = replace(tables["main"], notes=(*notes, *tables["main"].notes))
    return {key: replace(table, notes=(_caption(study), *table.notes)) for key, table in tables.items()}


# -- the figure ------------------------------------------------------------------------------------------------------------


def draw(reading: Reading, path: Path) -> None:
    """Progress and right first choices of every method, with 95 % intervals and what a guess gets right. As text (SVG), so
    that it is small and two of them can be compared.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    study = Study(reading.rollouts)
    rows, names = list(study.methods), [label(method) for method in study.methods]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 9}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9, 1.7 + 0.3 * len(rows)), sharey=True, width_ratios=(3, 2), layout="constrained"
        )
        for place, method in enumerate(rows):
            colour, hatch = METHODS[method[1]].colour, "" if method[0] == "act" else "///"
            own = stats.average(study.methods[method], study.tasks)
            firsts = study.firsts(method)
            ends = [(left, own.mean, own.low, own.high)] if own else []
            ends += [(right, firsts.percent, firsts.low, firsts.high)] if firsts else []
            for axis, mean, low, high in ends:
                axis.barh(place, mean, 0.6, color=colour, hatch=hatch, edgecolor="white")
                if low is not None and high is not None:
                    axis.plot([low, high], [place, place], "|-", color="black", linewidth=1)
        for number, task in enumerate(study.tasks):
            found = [(stats.average(study.methods[m], [task]), place) for place, m in enumerate(rows)]
            points = [(each.mean, place) for each, place in found if each]
            left.plot(*zip(*points, strict=True), "ov^sD"[number % 5], color="0.25", markersize=3.5, label=task)
        if study.guess is not None:
            right.axvline(study.guess, color="black", linestyle="--", linewidth=1)
            right.text(study.guess, 1.01, "chance", ha="center", fontsize=7, transform=right.get_xaxis_transform())
        left.set_yticks(range(len(rows)), names)
        left.set_xlabel("progress, %: average with its 95 % interval, and each task")
        right.set_xlabel(f"{FIRST.lower()}, % with 95 % interval")
        left.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
        left.invert_yaxis()
        for axis in (left, right):
            axis.set_xlim(0, 102)
            axis.spines[["top", "right"]].set_visible(False)
        hatched = f" Hatched: {POLICIES['diffusion']}." if any(policy != "act" for policy, _ in rows) else ""
        figure.supxlabel(f"A colour is a memory, the same in all figures.{hatched}", fontsize=7)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
