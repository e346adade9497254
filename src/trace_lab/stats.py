"""Rollouts in, numbers out: progress with bootstrap errors, averages in which every task weighs the same, branch accuracy,
waits, what TRACE has more than others. How numbers are laid out is the matter of `tables`. Imports no learning library.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_bench.referee import Decision, Outcome, Record, waits
from trace_bench.tasks import TASKS
from trace_lab.results import Method, Rollout, methods

RESAMPLES = 5000  # the error of a standard error is then 1 %
FIRST = "First branch right"
REACHED = "Rollouts that reach a branch"
NONE_WRONG = "Rollouts that decide, none wrong"
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
    """`count` of `of`, in percent, with its 95 % interval: Wilson's, or of several shares that weigh the same MOVER's."""

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


@dataclass(frozen=True)
class Lead:
    """What TRACE has more than a method with the same policy; None where there is nothing to compare."""

    method: Method
    average: Estimate
    trainings: int  # that have every task
    more: Estimate | None  # over these trainings' rollouts
    apart: bool | None  # whether the two intervals are
    over_trainings: Estimate | None  # Welch's, over trainings


@dataclass(frozen=True)
class Pairs:
    """The same, training by training: those with the same seed that began with the same encoders."""

    method: Method
    progress: Estimate
    count: int
    firsts: Estimate | None
    decided: int  # pairs in which both have a first branch


@dataclass(frozen=True)
class Waiting:
    """How a method does where the lamp lights early, and in the longest quarter of the delays."""

    method: Method
    tasks: tuple[str, ...]
    progress: tuple[float | None, float | None]
    in_time: tuple[Share | None, Share | None]


@dataclass(frozen=True)
class CueChoices:
    """Of scenes that were played with every cue. Who chooses alike in them does not know the cue."""

    method: Method
    task: str
    whole: Share | None  # with a choice for every cue; of these:
    alike: Share | None
    right: Share | None


# -- estimates -------------------------------------------------------------------------------------------------------------


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


def balanced(shares: Sequence[Share]) -> Share:
    """The mean of shares, each weighing the same. Its interval is made from theirs (MOVER, Zou and Donner 2008), so that it
    is not empty where all of them are 100 %.
    """
    percent = sum(each.percent for each in shares) / len(shares)
    down = math.hypot(*(each.percent - each.low for each in shares)) / len(shares)
    up = math.hypot(*(each.high - each.percent for each in shares)) / len(shares)
    return Share(sum(x.count for x in shares), sum(x.of for x in shares), percent, percent - down, percent + up)


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


# -- progress --------------------------------------------------------------------------------------------------------------


def cells(rollouts: Iterable[Rollout]) -> Cells:
    """Progress of one method's rollouts, sorted at every level: the order of the rollouts changes nothing."""
    found: dict[str, dict[int, list[float]]] = {task: {} for task in TASKS}
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


# -- branches and outcomes -------------------------------------------------------------------------------------------------


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
        REACHED: share(each.decisions[0].frame is not None for each in records),
        NONE_WRONG: share(all(hits) for hits in decided if hits),
    }


def first_branches(sheets: Sequence[Sequence[Record]]) -> Share | None:
    """First branches that are right, every task (a sheet each) weighing the same. None if one of them decides nothing."""
    found = [each for sheet in sheets if (each := branches(sheet)[FIRST])]
    return balanced(found) if found and len(found) == len(sheets) else None


def chance(records: Iterable[Record]) -> float | None:
    """Percentage of one task's branches that a guess gets right: one of the answers met. None if only one was met."""
    answers = {decision.answer for each in records for decision in each.decisions}
    return 100 / len(answers) if len(answers) > 1 else None


# -- a whole set -----------------------------------------------------------------------------------------------------------


class Study:
    """Rollouts of several methods, sorted: what all tables are made from.

    Args:
        rollouts: one or more, in any order.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            raise ValueError("rollouts: got none, expected at least one")
        self.rollouts = tuple(rollouts)
        own = {method: [each for each in rollouts if each.method == method] for method in methods()}
        self.methods: dict[Method, Cells] = {method: cells(some) for method, some in own.items() if some}
        self.met = [task for task in TASKS if any(task in each for each in self.methods.values())]
        self.tasks = [
            task for task in self.met if TASKS[task].suite
        ] or self.met  # averages are the suite's, if any is there
        self.keys = [(method, task) for method, each in self.methods.items() for task in each]

    @cached_property
    def sheets(self) -> dict[tuple[Method, str], list[Record]]:
        """The score sheets of each method and task."""
        found: dict[tuple[Method, str], list[Record]] = {key: [] for key in self.keys}
        for each in self.rollouts:
            found[each.method, each.record.task].append(each.record)
        return found

    @cached_property
    def guesses(self) -> dict[str, float | None]:
        """What a guess gets right of each task's branches."""
        return {task: chance(x.record for x in self.rollouts if x.record.task == task) for task in self.met}

    @property
    def guess(self) -> float | None:
        """The same over the tasks of the averages; None if it is not known of one."""
        known = [each for task in self.tasks if (each := self.guesses[task]) is not None]
        return sum(known) / len(known) if len(known) == len(self.tasks) else None

    def firsts(self, method: Method) -> Share | None:
        """First branches of a method that are right, over the tasks of the averages."""
        return first_branches([self.sheets.get((method, task), []) for task in self.tasks])

    @cached_property
    def trainings(self) -> dict[Method, dict[int, Training]]:
        """Those that have every task, by method and training seed."""
        return {method: self._trainings(method, own) for method, own in self.methods.items()}

    def _trainings(self, method: Method, own: Cells) -> dict[int, Training]:
        found: dict[int, Training] = {}
        mine = [each for each in self.rollouts if each.method == method]
        for seed, progress in by_seed(own, self.tasks).items():
            parts = [[x for x in mine if (x.training_seed, x.record.task) == (seed, task)] for task in self.tasks]
            firsts = first_branches([[each.record for each in part] for part in parts])
            encoders = tuple(",".join(sorted({each.encoder for each in part})) for part in parts)
            found[seed] = Training(progress, firsts.percent if firsts else None, encoders)
        return found


def leads(study: Study) -> list[Lead]:
    """What TRACE has more than each other method with the same policy."""
    averages = {method: found for method, own in study.methods.items() if (found := average(own, study.tasks))}
    rows = []
    for method, found in averages.items():
        trace = averages.get(ours := (method[0], "trace"))
        other = trace is not None and method != ours
        more = difference(study.methods[ours], study.methods[method], study.tasks) if other else None
        apart = None
        if trace and other and None not in (found.low, found.high, trace.low, trace.high):
            apart = trace.low > found.high or found.low > trace.high  # type: ignore[operator]
        own, theirs = ([x.progress for x in study.trainings.get(m, {}).values()] for m in (ours, method))
        rows.append(Lead(method, found, len(theirs), more, apart, student(own, theirs) if other else None))
    return rows


def pairs(study: Study) -> list[Pairs]:
    """What TRACE has more than each other method with the same policy, training by training; where there are two pairs."""
    rows = []
    for method, others in study.trainings.items():
        trace = study.trainings.get(ours := (method[0], "trace"), {})
        both = [(trace[seed], others[seed]) for seed in trace if seed in others and method != ours]
        same = [(a, b) for a, b in both if a.encoders == b.encoders]
        firsts = [a.firsts - b.firsts for a, b in same if a.firsts is not None and b.firsts is not None]
        if progress := student([a.progress - b.progress for a, b in same]):
            rows.append(Pairs(method, progress, len(same), student(firsts), len(firsts)))
    return rows


def waiting(study: Study) -> Iterator[Waiting]:
    """For each method its mean over the tasks of the averages, if it has all of them, and then every task met."""
    found: list[tuple[Method, str, bool, bool, float]] = []
    for task in study.met:
        some = [each for each in study.rollouts if each.record.task == task]
        marks = waits([each.record for each in some])
        found += [(x.method, task, *mark, 100 * x.record.progress) for x, mark in zip(some, marks, strict=True)]

    def row(method: Method, over: Sequence[str]) -> Waiting:
        parts = [[[x for x in found if x[:3] == (method, task, long)] for task in over] for long in (False, True)]
        means = [[np.mean(sorted(x[4] for x in each)) for each in part if each] for part in parts]
        early, late = (float(np.mean(each)) if len(each) == len(over) else None for each in means)
        first, last = (share(x[3] for each in part for x in each) for part in parts)
        return Waiting(method, tuple(over), (early, late), (first, last))

    for method in study.methods:
        own = [task for task in study.met if any(x[:2] == (method, task) for x in found)]
        if len(study.tasks) > 1 and set(study.tasks) <= set(own):
            yield row(method, study.tasks)
        yield from (row(method, [task]) for task in own)


def cue_choices(study: Study) -> list[CueChoices]:
    """Of each method and task with scenes that were played with every cue."""
    rows = []
    for method, task in study.keys:
        scenes: dict[tuple[int, int, int], dict[int, Decision]] = {}
        for each in study.rollouts:
            if (each.method, (record := each.record).task) == (method, task):
                scene = scenes.setdefault((each.training_seed, record.seed, record.delay), {})
                scene[record.cue] = record.decisions[0]
        every = {cue for scene in scenes.values() for cue in scene}
        made = [list(scene.values()) for scene in scenes.values() if len(every) > 1 and scene.keys() == every]
        whole = [scene for scene in made if all(first.choice is not None for first in scene)]
        if made:
            alike = share(len({first.choice for first in scene}) == 1 for scene in whole)
            right = share(all(first.correct for first in scene) for scene in whole)
            rows.append(CueChoices(method, task, share(scene in whole for scene in made), alike, right))
    return rows


def best_other(averages: Mapping[Method, Estimate | None], ours: Iterable[str]) -> Method | None:
    """The method with the best of these averages whose memory is none of `ours`."""
    taken = set(ours)
    others = {method: found.mean for method, found in averages.items() if found and method[1] not in taken}
    return max(others, key=others.__getitem__, default=None)
