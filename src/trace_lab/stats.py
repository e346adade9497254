"""From rollout lines to numbers and tables: progress with bootstrap errors, averages without one task, failures, branch
accuracy, waits, cues. It only reads; it runs no rollout, writes no file and imports no learning library.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_bench.referee import Decision, Outcome, Record, waits
from trace_bench.registry import EVERY, TASKS
from trace_lab.lines import NAMES, Method, Reading, Rollout
from trace_lab.tables import DASH, Show, Table

RESAMPLES = 5000  # the error of a standard error is then 1 %
OURS = ("trace", "signature-only", "unrouted", "no-delta", "mean-read", "no-auxiliary")  # TRACE and parts of it
FIRST = "First branch right"
type Sheets = Mapping[tuple[Method, str], Sequence[Record]]  # one for each method and task
type Cells = dict[str, dict[int, NDArray[np.float64]]]  # task, training seed: progress of each rollout in percent


@dataclass(frozen=True)
class Estimate:
    """A mean, in percent or points, its standard error and 95 % interval; without these where one number is all there is."""

    mean: float
    se: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Share:
    """`count` of `of`, in percent, with its 95 % Wilson interval."""

    count: int
    of: int
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Training:
    """One training of a method: means over its tasks, in percent, and the encoders with which it began."""

    progress: float
    firsts: float | None
    encoders: tuple[str, ...]


def estimate(terms: Sequence[tuple[float, NDArray[np.float64]]]) -> Estimate:
    """A weighted sum of the means of independent samples, each resampled within itself. Every mean, average and
    difference here is such a sum; the same samples give the same numbers to the last bit.
    """
    from scipy.stats import bootstrap  # takes seconds to import

    weights, samples = zip(*terms, strict=True)

    def total(*drawn: NDArray[np.float64], axis: int = -1) -> Any:
        return sum(weight * np.mean(sample, axis=axis) for weight, sample in zip(weights, drawn, strict=True))

    mean = float(total(*samples))
    if any(sample.size < 2 for sample in samples):
        return Estimate(mean)
    if all(np.ptp(sample) == 0 for sample in samples):  # resampling would only add rounding errors
        return Estimate(mean, 0.0, mean, mean)
    rng, many = np.random.default_rng(0), {"n_resamples": RESAMPLES, "batch": 500}  # a batch bounds the memory
    drawn = bootstrap(samples, total, **many, vectorized=True, paired=False, method="percentile", rng=rng)
    return Estimate(mean, float(drawn.standard_error), *map(float, drawn.confidence_interval))


def share(hits: Iterable[bool]) -> Share | None:
    """How many of them are true; None of none."""
    from scipy.stats import binomtest

    each = list(hits)
    if not each:
        return None
    low, high = binomtest(sum(each), len(each)).proportion_ci(method="wilson")
    return Share(sum(each), len(each), 100 * sum(each) / len(each), 100 * float(low), 100 * float(high))


def cells(rollouts: Iterable[Rollout]) -> Cells:
    """Progress of one method's rollouts, sorted at every level: the order of the lines changes nothing."""
    found: dict[str, dict[int, list[float]]] = {task: {} for task in EVERY}
    for each in rollouts:
        found[each.record.task].setdefault(each.training_seed, []).append(100 * each.record.progress)
    return {task: {s: np.sort(seeds[s]) for s in sorted(seeds)} for task, seeds in found.items() if seeds}


def _terms(own: Cells, tasks: Sequence[str], sign: int = 1) -> list[tuple[float, NDArray[np.float64]]]:
    """A task weighs as much as any other, and so does a training seed within it. Nothing if one of the tasks lacks."""
    weights = {task: sign / len(tasks) / len(own[task]) for task in tasks if task in own}
    return [(weights[t], sample) for t in weights for sample in own[t].values()] if len(weights) == len(tasks) else []


def average(own: Cells, tasks: Sequence[str]) -> Estimate | None:
    """The task-balanced mean of a method: the mean of its task means. None if it lacks one of the tasks."""
    terms = _terms(own, tasks)
    return estimate(terms) if terms else None


def difference(first: Cells, second: Cells, tasks: Sequence[str]) -> Estimate | None:
    """Task-balanced mean of the first method minus that of the second. None if either lacks one of the tasks."""
    plus, minus = _terms(first, tasks), _terms(second, tasks, -1)
    return estimate(plus + minus) if plus and minus else None


def by_seed(own: Cells, tasks: Sequence[str]) -> dict[int, float]:
    """The task-balanced mean of each training seed that has every task."""
    seeds = sorted(set.intersection(*(set(own.get(task, ())) for task in tasks)))
    return {seed: float(np.mean([own[task][seed].mean() for task in tasks])) for seed in seeds}


def seed_spread(own: Cells, tasks: Sequence[str]) -> float | None:
    """Standard deviation over training seeds of the task-balanced mean; of seeds (two or more) that have every task."""
    means = [*by_seed(own, tasks).values()]
    return float(np.std(means, ddof=1)) if len(means) > 1 else None


def failures(records: Sequence[Record]) -> dict[str, Share | None]:
    """How often each outcome came."""
    return {str(outcome): share(each.outcome == outcome for each in records) for outcome in Outcome}


def branches(records: Sequence[Record]) -> dict[str, Share | None]:
    """Branch accuracy, apart from progress. A branch is decided when its lamp was lit and an option was then taken.

    First branch right: of the first branches that are decided, those that follow the cue; a guess is right by chance. Later
        ones come only after a right one, and who guesses by how a scene looks may guess the same again.
    Rollouts that reach a branch: of all rollouts, those in which the lamp of the first branch was lit.
    Rollouts that decide, none wrong: of the rollouts with a decided branch, those in which all decided ones are right.
    """
    decided = [[d.correct for d in each.decisions if d.frame is not None and d.choice is not None] for each in records]
    return {
        FIRST: share(hits[0] is True for hits in decided if hits),
        "Rollouts that reach a branch": share(each.decisions[0].frame is not None for each in records),
        "Rollouts that decide, none wrong": share(all(hits) for hits in decided if hits),
    }


def _waits(rollouts: Sequence[Rollout], methods: Iterable[Method], met: Sequence[str], tasks: Sequence[str]) -> Table:
    """For each method its mean over these tasks, if it has all of them, and then every task met."""
    found: list[tuple[Method, str, bool, bool, float]] = []
    for task in met:
        some = [each for each in rollouts if each.record.task == task]
        marks = waits([each.record for each in some])
        found += [(x.method, task, *mark, 100 * x.record.progress) for x, mark in zip(some, marks, strict=True)]

    def values(method: Method, over: Sequence[str]) -> list[Any]:
        parts = [[[x for x in found if x[:3] == (method, task, long)] for task in over] for long in (False, True)]
        means = [[np.mean(sorted(x[4] for x in each)) for each in part if each] for part in parts]
        progress = [float(np.mean(each)) if len(each) == len(over) else None for each in means]
        return [*progress, *(share(x[3] for each in part for x in each) for part in parts)]

    rows: list[tuple[Any, ...]] = []
    for method in methods:
        own = [task for task in met if any(x[:2] == (method, task) for x in found)]
        whole = [("all", tasks)] if len(tasks) > 1 and set(tasks) <= set(own) else []
        rows += [(NAMES[method], name, *values(method, over)) for name, over in [*whole, *((t, [t]) for t in own)]]
    shows = dict.fromkeys(("Progress, shorter waits", "longest quarter"), "{:.1f}".format)
    counts = dict.fromkeys(("Lamp in time, shorter waits", "in time, longest quarter"), COUNTED_OF)
    title = "Waiting for the first lamp: mean progress (%), and rollouts in which it lights in time"
    return Table(title, {"Method": str, "Task": str, **shows, **counts}, rows)


def _cues(keys: Iterable[tuple[Method, str]], rollouts: Sequence[Rollout]) -> Table | None:
    """Of scenes that were played with every cue. Who chooses alike in them does not know the cue; None without such."""
    rows: list[tuple[Any, ...]] = []
    for method, task in keys:
        scenes: dict[tuple[int, int, int], dict[int, Decision]] = {}
        for each in rollouts:
            if (each.method, (record := each.record).task) == (method, task):
                scene = scenes.setdefault((each.training_seed, record.seed, record.delay), {})
                scene[record.cue] = record.decisions[0]
        every = {cue for scene in scenes.values() for cue in scene}
        made = [list(scene.values()) for scene in scenes.values() if len(every) > 1 and scene.keys() == every]
        whole = [scene for scene in made if all(first.choice is not None for first in scene)]
        if made:
            alike = share(len({first.choice for first in scene}) == 1 for scene in whole)
            right = share(all(first.correct for first in scene) for scene in whole)
            rows.append((NAMES[method], task, share(scene in whole for scene in made), alike, right))
    names = ("A choice with every cue", "the same whatever the cue", "right with every cue")
    title = "Scenes played with every cue: does the first choice change with it?"
    return Table(title, {"Method": str, "Task": str} | dict.fromkeys(names, COUNTED_OF), rows) if rows else None


def chance(records: Iterable[Record]) -> float | None:
    """Percentage of one task's branches that a guess gets right: one of the answers met. None if only one was met."""
    answers = {decision.answer for each in records for decision in each.decisions}
    return 100 / len(answers) if len(answers) > 1 else None


COUNTED: Show = "{0.count} ({0.percent:.0f} %)".format
COUNTED_OF: Show = "{0.count} of {0.of} ({0.percent:.0f} %)".format
RATE: Show = "{0.percent:.1f} [{0.low:.1f}, {0.high:.1f}] ({0.count}/{0.of})".format


def _score(value: Estimate, digits: int = 1) -> str:
    return f"{value.mean:.{digits}f} ± {DASH if value.se is None else f'{value.se:.{digits}f}'}"


def _interval(value: Estimate, digits: int = 2) -> str:
    return DASH if value.low is None else f"[{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _missing(methods: dict[Method, Cells], tasks: Sequence[str]) -> Iterator[str]:
    if 0 < len(absent := [task for task in TASKS if task not in tasks]) < len(TASKS):
        yield f"Averages are over {len(tasks)} of the suite's {len(TASKS)} tasks; no rollouts of {', '.join(absent)}."
    for method, own in methods.items():
        seeds = {seed for task in own.values() for seed in task}
        lacking = [task for task in tasks if task not in own]
        lacking += [f"{task} with training seed {s}" for task in own for s in sorted(seeds - set(own[task]))]
        if lacking:
            no_average = ", hence no average" if len(own) < len(tasks) else ""
            yield f"{NAMES[method]}: no rollouts of {', '.join(lacking)}{no_average}."


def _averages(title: str, methods: dict[Method, Cells], over: Mapping[str, Sequence[str]], show: Show) -> Table:
    """Under each heading, every method's average over these tasks."""
    rows = [(NAMES[method], *(average(own, some) for some in over.values())) for method, own in methods.items()]
    return Table(title, {"Method": str} | dict.fromkeys(over, show), rows, bold=tuple(over))


def _beside(table: Table, heading: str, show: Show, values: Sequence[Any]) -> Table:
    """A table with one column more."""
    rows = [(*row, value) for row, value in zip(table.rows, values, strict=True)]
    return replace(table, columns=table.columns | {heading: show}, rows=rows)


def _firsts(sheets: Sequence[Sequence[Record]]) -> tuple[float, int, int] | None:
    """First branches that are right: in percent, every task (a sheet each) weighing the same; and how many of how many."""
    found = [each for sheet in sheets if (each := branches(sheet)[FIRST])]
    if not found or len(found) < len(sheets):
        return None
    return sum(each.percent for each in found) / len(found), sum(x.count for x in found), sum(x.of for x in found)


def _main(methods: dict[Method, Cells], tasks: Sequence[str], sheets: Sheets, guess: float | None) -> Table:
    over = {task: [task] for task in tasks} | {"Average": tasks}
    table = _averages("Main results: mean stage progress (%) ± SE", methods, over, _score)
    spreads = [seed_spread(own, tasks) for own in methods.values()]
    if any(spread is not None for spread in spreads):
        table = _beside(table, "SD over training seeds", "{:.1f}".format, spreads)
    by_chance = "" if guess is None else f" (chance: {guess:.1f})"
    firsts = [_firsts([sheets.get((method, task), []) for task in tasks]) for method in methods]
    return _beside(table, f"{FIRST}{by_chance}", lambda v: f"{v[0]:.1f} ({v[1]}/{v[2]})", firsts)


def _leads(
    methods: dict[Method, Cells], tasks: Sequence[str], trainings: Mapping[Method, Mapping[int, Training]]
) -> Table | None:
    """What TRACE has more than each other method with the same policy; None where there is nothing to compare."""
    averages = {method: found for method, own in methods.items() if (found := average(own, tasks))}
    rows: list[tuple[Any, ...]] = []
    for method, found in averages.items():
        trace = averages.get(ours := (method[0], "trace"))
        other = trace is not None and method != ours
        lead = difference(methods[ours], methods[method], tasks) if other else None
        apart = None
        if trace and other and None not in (found.low, found.high, trace.low, trace.high):
            apart = trace.low > found.high or found.low > trace.high  # type: ignore[operator]
        own, theirs = ([each.progress for each in trainings.get(m, {}).values()] for m in (ours, method))
        again = student(own, theirs) if other else None
        rows.append((NAMES[method], found, len(theirs), lead, apart, again))
    if all(row[3] is None for row in rows):
        return None
    whole: Show = lambda v: f"{v.mean:.1f} {_interval(v, 1)}"  # noqa: E731
    columns: dict[str, Show] = {
        "Method": str,
        "Average": whole,
        "Whole trainings": str,
        "TRACE has more by": lambda v: f"{v.mean:+.1f} {_interval(v, 1)}",
        "Intervals apart": lambda v: "yes" if v else "no",
        "The same over trainings": lambda v: f"{v.mean:+.1f} {_interval(v, 1)}",
    }
    note = (
        "Intervals tell how sure one can be about these trainings, by drawing their rollouts anew. The last column tells "
        "how sure one can be about others: Welch's interval over whole trainings, of which both must have two."
    )
    return Table("Average progress (%) with 95 % intervals, and what TRACE has more", columns, rows, (note,))


def _trainings(own: Cells, rollouts: Sequence[Rollout], tasks: Sequence[str]) -> dict[int, Training]:
    """Those of a method that have every task, by training seed; `rollouts` are the method's."""
    found: dict[int, Training] = {}
    for seed, progress in by_seed(own, tasks).items():
        parts = [[each for each in rollouts if (each.training_seed, each.record.task) == (seed, t)] for t in tasks]
        firsts = _firsts([[each.record for each in part] for part in parts])
        encoders = tuple(",".join(sorted({each.encoder for each in part})) for part in parts)
        found[seed] = Training(progress, firsts and firsts[0], encoders)
    return found


def student(more: Sequence[float], less: Sequence[float] | None = None) -> Estimate | None:
    """The mean of differences with Student's 95 % interval; or that of one sample less that of another (Welch's). None of
    fewer than two; no interval where they do not differ among themselves.
    """
    from scipy.stats import t

    samples = [np.array(each) for each in (more, less) if each is not None]
    if min(map(len, samples)) < 2:
        return None
    mean = float(samples[0].mean() - (0 if less is None else samples[1].mean()))
    if all(np.ptp(each) < 1e-9 for each in samples):
        return Estimate(mean)
    parts = [(each.var(ddof=1) / len(each), len(each) - 1) for each in samples]  # of the mean's variance; its degrees
    variance = sum(part for part, _ in parts)
    degrees = variance**2 / sum(part**2 / own for part, own in parts)
    return Estimate(mean, float(variance**0.5), *map(float, t.interval(0.95, degrees, mean, variance**0.5)))


def _pairs(trainings: Mapping[Method, Mapping[int, Training]]) -> Table | None:
    """What TRACE has more than each other method with the same policy, training by training; None without pairs."""
    rows: list[tuple[Any, ...]] = []
    for method, others in trainings.items():
        trace = trainings.get(ours := (method[0], "trace"), {})
        both = [(trace[seed], others[seed]) for seed in trace if seed in others and method != ours]
        pairs = [(a, b) for a, b in both if a.encoders == b.encoders]
        firsts = [a.firsts - b.firsts for a, b in pairs if a.firsts is not None and b.firsts is not None]
        if progress := student([a.progress - b.progress for a, b in pairs]):
            found = student(firsts)
            rows.append((NAMES[method], (progress, len(pairs)), found and (found, len(firsts))))
    whole: Show = lambda v: f"{v[0].mean:+z.1f} {_interval(v[0], 1)} ({v[1]})"  # noqa: E731
    title = "What TRACE has more (points), pair by pair: trainings with the same seed on the same encoders"
    note = "Means with Student's 95 % interval and, in brackets, the number of pairs."
    return Table(title, {"TRACE against": str, "Progress": whole, FIRST: whole}, rows, (note,)) if rows else None


def _tool(methods: dict[Method, Cells], tasks: Sequence[str], reference: Method | None) -> Table:
    title, rest = "Tool, and averages without it (%)", [task for task in tasks if task != "Tool"]
    if "Tool" not in tasks:
        return Table(title, {}, [], ("Left out: there are no Tool rollouts.",))
    dropped = {method: average(own, rest) for method, own in methods.items()}
    others = {method: found.mean for method, found in dropped.items() if found and method[1] not in OURS}
    against = reference or max(others, key=others.__getitem__, default=None)
    columns: dict[str, Show] = {
        "Method": str,
        "Tool mean ± SE": lambda v: _score(v, 2),
        "Tool 95 % interval": _interval,
        "Drop-Tool average": lambda v: f"{v.mean:.2f} {_interval(v)}",
        f"Drop-Tool gap vs. {NAMES[against] if against else DASH}": lambda v: f"{v.mean:+.2f} {_interval(v)}",
    }
    gaps = {m: difference(own, methods[against], rest) for m, own in methods.items() if against and m != against}
    rows = [(NAMES[m], *[average(own, ["Tool"])] * 2, dropped[m], gaps.get(m)) for m, own in methods.items()]
    return Table(title, columns, rows)


def _span(numbers: Iterable[int]) -> str:
    each = sorted(set(numbers))
    return str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}"


def report(reading: Reading, reference: Method | None = None) -> dict[str, Table]:
    """All tables by key; what was left out in reading is noted under the first. The drop-Tool gap is against `reference`,
    or else the method with the best drop-Tool average that is neither TRACE nor a part of it."""
    rollouts = reading.rollouts
    methods = {m: own for m in NAMES if (own := cells(each for each in rollouts if each.method == m))}
    if not methods or reference not in {None, *methods}:
        raise ValueError(f"rollouts: got those of {list(methods)}, expected some, and of the reference {reference}")
    met = [task for task in EVERY if any(task in own for own in methods.values())]
    tasks = [task for task in met if task in TASKS] or met  # averages are the suite's, where there is any of it
    keys = [(method, task) for method, own in methods.items() for task in own]
    sheets = {key: [each.record for each in rollouts if (each.method, each.record.task) == key] for key in keys}
    guess = {task: chance(each.record for each in rollouts if each.record.task == task) for task in met}
    trainings = {m: _trainings(own, [x for x in rollouts if x.method == m], tasks) for m, own in methods.items()}
    failed = [(NAMES[method], task, *failures(some).values()) for (method, task), some in sheets.items()]
    branched = [(NAMES[m], task, guess[task], *branches(some).values()) for (m, task), some in sheets.items()]
    lead: dict[str, Show] = {"Method": str, "Task": str}
    rates = lead | {"Chance": "{:.1f}".format} | dict.fromkeys(branches([]), RATE)
    left = {"All tasks": tasks} | {f"Drop {task}": [other for other in tasks if other != task] for task in tasks}
    blind = [guess[task] for task in tasks]
    main = _main(methods, tasks, sheets, None if None in blind else sum(blind) / len(blind))  # type: ignore[arg-type]
    tables = {
        "main": replace(main, notes=(*_missing(methods, tasks), *reading.notes)),
        "leave_one_task_out": _averages("Leave-one-task-out averages (%)", methods, left, "{0.mean:.2f}".format),
        "tool": _tool(methods, tasks, reference),
        "failures": Table("Failure taxonomy: rollouts (share)", lead | dict.fromkeys(failures([]), COUNTED), failed),
        "branches": Table("Branch accuracy (%) with Wilson 95 % intervals", rates, branched),
        "waits": _waits(rollouts, methods, met, tasks),
    }
    sometimes = {
        "leads": _leads(methods, tasks, trainings),
        "pairs": _pairs(trainings),
        "cues": _cues(keys, rollouts),
    }
    tables |= {key: table for key, table in sometimes.items() if table is not None}
    sizes = _span(len(sample) for own in methods.values() for seeds in own.values() for sample in seeds.values())
    trained = _span(len({seed for seeds in own.values() for seed in seeds}) for own in methods.values())
    caption = (
        f"{len(rollouts)} rollouts: {sizes} a method, task and training seed. Training seeds a method: {trained}. "
        f"Split: {', '.join(sorted({each.record.split for each in rollouts}))}."
    )
    return {key: replace(table, notes=(caption, *table.notes)) for key, table in tables.items()}
