"""Numbers against hand-made ones, the paper's own tables and analytic errors; cells that are missing; layout."""

import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from trace_bench.referee import Decision, Outcome, Record
from trace_bench.tasks import of_suite
from trace_lab import results, stats, tables
from trace_lab.results import Reading, Rollout
from trace_lab.stats import Estimate
from trace_lab.tables import DASH
from trace_memory.registry import METHODS, of_policies

ACT, DIFFUSION = ("act", "none"), ("diffusion", "none")
TRACE, TRACE_DIFFUSION, RETRIEVAL = ("act", "trace"), ("diffusion", "trace"), ("act", "retrieval")
GRU = ("act", "gru")

# Stages that succeeded in 25 rollouts of 8, 12, 8, 4 and 12 stages: the paper's main table. RETRIEVAL stands for pi_0.5.
STAGES = {"Tool": 8, "Book": 12, "Laundry": 8, "Cable": 4, "Medicine": 12}
PAPER = {
    DIFFUSION: (36, 37, 44, 34, 116),
    ACT: (62, 41, 23, 44, 82),
    RETRIEVAL: (91, 153, 95, 49, 178),
    TRACE: (109, 249, 162, 51, 230),
    TRACE_DIFFUSION: (117, 205, 141, 51, 148),
}


def played(method, task, done, *, stages=4, training_seed=0, decisions=None, outcome=Outcome.OTHER, first=0):
    """One rollout for each number of stages done."""
    branches = decisions or [Decision("branch", 0)]
    made = []
    for seed, count in enumerate(done, start=first):
        steps = {f"stage {i}": i if i < count else None for i in range(stages)}
        record = Record(task, seed, "heldout", 0, 60, steps, branches, outcome=outcome)
        made.append(Rollout(method, training_seed, record))
    return made


def papers() -> list[Rollout]:
    made = []
    for method, sums in PAPER.items():
        for (task, stages), total in zip(STAGES.items(), sums, strict=True):
            base, extra = divmod(total, 25)
            made += played(method, task, [base + (i < extra) for i in range(25)], stages=stages)
    return made


def table_of(rollouts, key, **named) -> dict[str, dict]:
    return {
        each["Method"]: each for each in tables.to_json(tables.report(Reading(tuple(rollouts)), **named))[key]["rows"]
    }


# -- numbers --------------------------------------------------------------------------------------------------------


def test_bootstrap_error_is_the_analytic_one():
    sample = np.random.default_rng(3).normal(50, 20, size=900)
    found = stats.estimate([(1.0, sample)])
    se = sample.std(ddof=1) / 30
    assert found.mean == pytest.approx(sample.mean())
    assert found.se == pytest.approx(se, rel=0.04)
    assert found.low == pytest.approx(found.mean - 1.96 * se, abs=0.1 * se)
    assert found.high == pytest.approx(found.mean + 1.96 * se, abs=0.1 * se)


def test_error_of_a_balanced_average_adds_up_over_tasks_and_seeds():
    """Two tasks with errors a and b, the second from two seeds: sqrt(a^2 + b^2) / 2."""
    rng = np.random.default_rng(5)
    one, two, three = rng.normal(40, 30, 400), rng.normal(60, 10, 100), rng.normal(70, 10, 400)
    found = stats.average({"Tool": {0: one}, "Book": {0: two, 1: three}}, ["Tool", "Book"])
    book = (two.mean() + three.mean()) / 2
    variance = one.var() / 400 + (two.var() / 100 + three.var() / 400) / 4
    assert found.mean == pytest.approx((one.mean() + book) / 2)
    assert found.se == pytest.approx(math.sqrt(variance) / 2, rel=0.04)


def test_hand_made_means():
    rollouts = played(ACT, "Tool", [0, 4]) + played(ACT, "Book", [1, 2, 3, 4])
    own = stats.cells(rollouts)
    assert stats.average(own, ["Tool"]).mean == 50.0
    assert stats.average(own, ["Book"]).mean == 62.5
    assert stats.average(own, ["Tool", "Book"]).mean == 56.25  # of tasks, not of the six rollouts
    assert stats.average(own, ["Tool", "Cable"]) is None
    assert stats.average(own, []) is None


def test_unequal_training_seeds_weigh_the_same():
    rollouts = played(ACT, "Tool", [4, 4], training_seed=0) + played(ACT, "Tool", [0] * 8, training_seed=1)
    assert stats.average(stats.cells(rollouts), ["Tool"]).mean == 50.0
    equal = played(ACT, "Tool", [4, 3], training_seed=0) + played(ACT, "Tool", [0, 2], training_seed=1)
    assert stats.average(stats.cells(equal), ["Tool"]).mean == 100 * 9 / 16  # the pooled mean


def test_spread_over_training_seeds():
    """Averages of 50, 75 and 100 % deviate by 25; one seed has none; a seed that lacks a task is left out."""
    rollouts = []
    for seed, tool, book in ((0, 0, 4), (1, 3, 3), (2, 4, 4)):
        rollouts += played(ACT, "Tool", [tool] * 2, training_seed=seed) + played(
            ACT, "Book", [book] * 3, training_seed=seed
        )
    tasks = ["Tool", "Book"]
    assert stats.seed_spread(stats.cells(rollouts), tasks) == pytest.approx(25.0)
    assert stats.seed_spread(stats.cells(rollouts + played(ACT, "Tool", [0, 0], training_seed=7)), tasks) == 25.0
    assert stats.seed_spread(stats.cells(each for each in rollouts if each.training_seed == 1), tasks) is None
    assert stats.seed_spread(stats.cells(rollouts), ["Tool", "Cable"]) is None
    (made,) = table_of(rollouts, "main").values()
    assert made["SD over training seeds"] == pytest.approx(25.0)
    assert "SD over training seeds" not in table_of(played(ACT, "Tool", [1, 2]), "main")["ACT"]


def test_resampling_stays_within_a_seed():
    """Seeds that differ only from each other add nothing to the error: that is what the spread is for."""
    own = stats.cells(played(ACT, "Tool", [0] * 9, training_seed=0) + played(ACT, "Tool", [4] * 9, training_seed=1))
    assert stats.average(own, ["Tool"]) == Estimate(50.0, 0.0, 50.0, 50.0)


@pytest.mark.parametrize("done", [0, 1, 4])
def test_equal_rollouts_have_no_error(done):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = stats.cells(played(ACT, "Tool", [done] * 25) + played(ACT, "Book", [done] * 7, stages=7))
        for tasks in (["Tool"], ["Book"], ["Tool", "Book"]):
            found = stats.average(own, tasks)
            assert (found.se, found.low, found.high) == (0.0, found.mean, found.mean)
        mixed = stats.cells(played(ACT, "Tool", [done] * 25) + played(ACT, "Book", [0, 4] * 10))
        half, whole = stats.average(mixed, ["Tool", "Book"]), stats.average(mixed, ["Book"])
    assert half.se == pytest.approx(whole.se / 2, rel=0.04)


def test_one_rollout_has_an_unknown_error():
    rollouts = played(ACT, "Tool", [2])
    assert stats.average(stats.cells(rollouts), ["Tool"]) == Estimate(50.0, None, None, None)
    text = tables.markdown(tables.report(Reading(tuple(rollouts))))
    assert f"**50.0 ± {DASH}**" in text
    assert "nan" not in text


def test_difference_of_two_methods():
    rng = np.random.default_rng(0)
    high, low = {"Tool": {0: rng.normal(80, 10, 400)}}, {"Tool": {0: rng.normal(50, 20, 400)}}
    found = stats.difference(high, low, ["Tool"])
    mean, se = high["Tool"][0].mean() - low["Tool"][0].mean(), math.hypot(10, 20) / 20
    assert found.mean == pytest.approx(mean)
    assert found.se == pytest.approx(se, rel=0.08)
    assert (found.low, found.high) == pytest.approx((mean - 1.96 * se, mean + 1.96 * se), abs=0.2)
    assert stats.difference(low, high, ["Tool"]).mean == -found.mean
    assert stats.difference(high, low, ["Tool", "Book"]) is None


def test_wilson_interval():
    """8 of 10, from the formula by hand: (0.8 + z^2/20 +- z sqrt(0.016 + z^2/400)) / (1 + z^2/10)."""
    z = 1.959963984540054
    middle, half, scale = 0.8 + z**2 / 20, z * math.sqrt(0.016 + z**2 / 400), 1 + z**2 / 10
    found = stats.share([True] * 8 + [False] * 2)
    assert (found.count, found.of, found.percent) == (8, 10, 80.0)
    assert (found.low, found.high) == pytest.approx((100 * (middle - half) / scale, 100 * (middle + half) / scale))
    assert (round(found.low, 2), round(found.high, 2)) == (49.02, 94.33)  # as printed in textbooks
    assert stats.share([]) is None
    assert stats.share([False] * 10).low == 0.0


def test_branch_accuracy_counts_what_it_says():
    right, wrong = Decision("a", 1, 40, 50, 1), Decision("b", 0, 60, 70, 2)
    undecided, dark = Decision("b", 0, 60), Decision("a", 1)
    groups = [[right, wrong], [right, undecided], [right, right], [undecided, dark], [dark, dark], [wrong, dark]]
    rollouts = [played(ACT, "Tool", [1], decisions=each, first=i)[0] for i, each in enumerate(groups)]
    found = stats.branches([each.record for each in rollouts])
    counts = {name: (each.count, each.of) for name, each in found.items()}
    assert counts == {
        "First branch right": (3, 4),
        "Rollouts that reach a branch": (5, 6),
        "Rollouts that decide, none wrong": (2, 4),
    }
    assert stats.chance(each.record for each in rollouts) == 50.0  # the wrong choice 2 is no answer
    assert stats.chance(each.record for each in rollouts[4:5]) is None
    (made,) = tables.to_json(tables.report(Reading(tuple(rollouts))))["branches"]["rows"]
    assert made["Chance"] == 50.0
    assert made["First branch right"]["percent"] == 75.0
    assert stats.branches([rollouts[4].record])["First branch right"] is None


def test_waits_tell_who_does_not_wait_for_the_lamp():
    def seen(method, lamps):  # delay and time of the first lamp
        decisions = [(delay, [Decision("first", 0, lamp)]) for delay, lamp in lamps]
        records = [
            Record("Cable", seed, "heldout", 0, delay, {"a": None}, each)
            for seed, (delay, each) in enumerate(decisions)
        ]
        return [Rollout(method, 0, record) for record in records]

    patient = seen(ACT, [(60, 164), (61, 165), (70, 174), (110, 234)])  # 104 steps after the delay, once 20 later
    hasty = seen(TRACE, [(60, 164), (61, 186), (70, 174), (110, None)])  # once 21 later, once never
    acts, traces = tables.to_json(tables.report(Reading(tuple(patient + hasty))))["waits_by_task"]["rows"]
    names = ("Lamp in time, shorter waits", "in time, longest quarter")
    counts = [(each[name]["count"], each[name]["of"]) for each in (acts, traces) for name in names]
    assert counts == [(3, 3), (1, 1), (2, 3), (0, 1)]
    more = [replace(each, record=replace(each.record, task="Tool", stages={"a": 1})) for each in patient]
    made = tables.to_json(tables.report(Reading(tuple(patient + more))))
    heads = ("Task", "Progress, shorter waits", "longest quarter")
    progress = [tuple(each[head] for head in heads) for each in made["waits_by_task"]["rows"]]
    assert progress == [("all", 50.0, 50.0), ("Tool", 100.0, 100.0), ("Cable", 0.0, 0.0)]
    assert [each["Task"] for each in made["waits"]["rows"]] == ["all"]


def test_who_chooses_alike_whatever_the_cue_does_not_know_it():
    def chose(method, *scenes):  # for each scene the choice with each cue
        return [
            Rollout(
                method, 0, Record("Cable", seed, "heldout", cue, 60, {"a": 1}, [Decision("first", cue, 40, 50, choice)])
            )
            for seed, choices in enumerate(scenes)
            for cue, choice in enumerate(choices)
        ]

    guesses = chose(ACT, (1, 1), (0, 0), (1, None), (0, 1), (1,))  # the last one was not played with every cue
    knows = chose(TRACE, (0, 1), (0, 1), (1, 1))
    found = table_of([*guesses, *knows], "cues")
    names = ("A choice with every cue", "the same whatever the cue", "right with every cue")
    counts = {who: [(each[name]["count"], each[name]["of"]) for name in names] for who, each in found.items()}
    assert counts == {"ACT": [(3, 4), (2, 3), (1, 3)], "TRACE Regression": [(3, 3), (1, 3), (2, 3)]}
    assert "cues" not in tables.report(Reading(tuple(guesses[::2])))


def test_failures_are_counted_for_each_task():
    rollouts = (
        played(ACT, "Tool", [4, 4, 4], outcome=Outcome.SUCCESS)
        + played(ACT, "Tool", [1], outcome=Outcome.WRONG, first=9)
        + played(ACT, "Cable", [0, 0], outcome=Outcome.PREBRANCH)
    )
    made = tables.report(Reading(tuple(rollouts)))
    tool, cable = tables.to_json(made)["failures"]["rows"]
    assert [*tool] == ["Method", "Task", *map(str, Outcome)]
    assert {name: tool[name]["count"] for name in map(str, Outcome) if tool[name]["count"]} == {
        "success": 3,
        "wrong branch": 1,
    }
    assert cable["pre-branch failure"]["percent"] == 100.0
    assert "| ACT | Tool | 3 (75 %) | 0 (0 %) | 1 (25 %) | 0 (0 %) | 0 (0 %) | 0 (0 %) |" in tables.markdown(made)


# -- the paper's tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "all_tasks", "dropped"),
    [
        ("Diffusion Policy", 25.00, (26.75, 28.17, 25.75, 22.75, 21.58)),
        ("ACT", 25.50, (24.12, 28.46, 29.00, 20.88, 25.04)),
        ("ACT + retrieval prompt", 50.47, (51.71, 50.33, 51.21, 50.83, 48.25)),
        ("TRACE Regression", 69.23, (72.92, 65.79, 66.29, 73.79, 67.38)),
        ("TRACE Diffusion", 59.53, (59.79, 57.33, 56.79, 61.66, 62.08)),
    ],
)
def test_leave_one_task_out_of_the_paper(name, all_tasks, dropped):
    found = table_of(papers(), "leave_one_task_out")[name]
    assert found["All tasks"]["mean"] == pytest.approx(all_tasks, abs=0.01)
    assert [found[f"Drop {task}"]["mean"] for task in of_suite()] == pytest.approx(
        dropped, abs=0.01
    )  # theirs are of rounded means


def test_drop_tool_of_the_paper():
    rollouts = papers()
    found = table_of(rollouts, "tool")
    gap = "Drop-Tool gap vs. ACT + retrieval prompt"
    assert f"{found['TRACE Regression']['Drop-Tool average']['mean']:.2f}" == "72.92"
    assert f"{found['TRACE Diffusion']['Drop-Tool average']['mean']:.2f}" == "59.79"
    assert f"{found['TRACE Regression'][gap]['mean']:+.2f}" == "+21.21"
    assert f"{found['TRACE Diffusion'][gap]['mean']:+.2f}" == "+8.08"
    assert found["ACT + retrieval prompt"][gap] is None
    assert found["TRACE Regression"]["Tool mean ± SE"]["mean"] == pytest.approx(54.5)
    named = table_of(rollouts, "tool", reference=ACT)["TRACE Regression"]["Drop-Tool gap vs. ACT"]
    assert named["mean"] == pytest.approx(72.9167 - 24.125, abs=1e-3)
    with pytest.raises(ValueError, match=r"reference: got \('act', 'gru'\), expected one of"):
        table_of(rollouts, "tool", reference=("act", "gru"))


def test_intervals_of_the_paper():
    """Samples with the paper's task means and standard errors give its drop-Tool intervals."""

    def sample(mean, se):  # half below, half above: the error of the mean of 400 is se
        return {0: np.repeat([mean - 20 * se, mean + 20 * se], 200)}

    rest = ["Book", "Laundry", "Cable", "Medicine"]
    ours = dict(zip(rest, map(sample, (83.00, 81.00, 51.00, 76.67), (0.86, 2.84, 1.11, 1.05)), strict=True))
    pi = dict(zip(rest, map(sample, (51.00, 47.50, 49.00, 59.33), (6.99, 1.45, 0.57, 1.45)), strict=True))
    found, gap = stats.average(ours, rest), stats.difference(ours, pi, rest)
    assert (found.mean, found.low, found.high) == pytest.approx((72.92, 71.28, 74.55), abs=0.06)
    assert (gap.mean, gap.low, gap.high) == pytest.approx((21.21, 17.27, 25.15), abs=0.15)


def test_parts_of_trace_are_no_reference():
    """Without auxiliary losses TRACE is still TRACE: the gap must not be against itself."""
    rollouts = papers() + [each for task in of_suite() for each in played(("act", "no-auxiliary"), task, [4] * 5)]
    assert "Drop-Tool gap vs. ACT + retrieval prompt" in table_of(rollouts, "tool")["TRACE Regression"]
    alone = [each for each in rollouts if each.method in {TRACE, ("act", "no-auxiliary")}]
    assert table_of(alone, "tool")["TRACE Regression"][f"Drop-Tool gap vs. {DASH}"] is None


# -- layout ---------------------------------------------------------------------------------------------------------


def test_main_table_as_text():
    rollouts = [
        each for task in of_suite() for each in played(ACT, task, [1, 1]) + played(TRACE, task, [2, 4], first=5)
    ]
    text = tables.markdown(tables.report(Reading(tuple(rollouts))))
    head, rule, act, ours = text.split("\n\n")[1].split("\n")
    assert head == "| Method | Tool | Book | Laundry | Cable | Medicine | Average | First branch right |"
    assert rule == "|" + " --- |" * 8
    assert act == "| ACT |" + " 25.0 ± 0.0 |" * 6 + f" {DASH} |"
    cells = ours.strip("| ").split(" | ")
    assert cells[0] == "TRACE Regression"
    assert all(each.startswith("**75.0 ± ") and each.endswith("**") for each in cells[1:-1])
    assert cells[-1] == DASH  # nobody has decided
    caption = "20 rollouts: 2 a method, task and training seed. Training seeds a method: 1. Split: heldout."
    assert text.count(caption) == text.count("## ") == 9


def test_first_branches_stand_beside_progress_and_every_task_weighs_the_same():
    right, wrong, other = Decision("a", 1, 40, 50, 1), Decision("a", 1, 40, 50, 0), Decision("a", 0, 40, 50, 0)
    tool = [played(ACT, "Tool", [1], decisions=[each], first=i) for i, each in enumerate([right, wrong, wrong, other])]
    book = [played(ACT, "Book", [1], decisions=[each], first=i) for i, each in enumerate([right, other])]
    silent = played(TRACE, "Book", [1, 1]) + played(TRACE, "Tool", [1], decisions=[right])
    main = tables.report(Reading(tuple(sum([*tool, *book], silent))))["main"]
    assert list(main.columns)[-1] == "First branch right (chance: 50.0)"
    firsts = {row[0]: row[-1] and (row[-1].percent, row[-1].count, row[-1].of) for row in main.rows}
    assert firsts == {
        "ACT": (75.0, 4, 6),  # half of Tool's and all of Book's, not 4 of 6
        "TRACE Regression": None,  # on Book it decides nothing
    }
    assert "| 75.0 (4/6) |" in tables.markdown({"main": main})


def test_a_summary_counts_trainings_that_have_every_task():
    rollouts = [each for s in (0, 1) for each in played(ACT, "Tool", [1, 1], training_seed=s)]
    rollouts += played(ACT, "Book", [2, 4], decisions=[Decision("a", 1, 40, 50, 1)])
    (row,) = tables.report(Reading(tuple(rollouts)))["summary"].rows
    assert (row[0], row[1].mean, row[2], row[3]) == ("ACT", 50.0, None, 1)  # on Tool it decides nothing


def test_leads_of_trace_over_those_with_its_policy():
    rollouts = played(ACT, "Tool", [1, 1, 1, 2]) + played(TRACE, "Tool", [4, 4, 4, 3], first=9)
    rollouts += played(RETRIEVAL, "Tool", [4, 3, 4, 4]) + played(RETRIEVAL, "Tool", [4, 4, 4, 4], training_seed=1)
    rollouts += played(DIFFUSION, "Tool", [1, 2])
    leads = {row["Method"]: row for row in tables.to_json(tables.report(Reading(tuple(rollouts))))["leads"]["rows"]}
    more = {method: row["TRACE's lead"] and row["TRACE's lead"]["mean"] for method, row in leads.items()}
    assert more == {
        "ACT": 93.75 - 31.25,
        "Diffusion Policy": None,  # no TRACE with that policy
        "TRACE Regression": None,
        "ACT + retrieval prompt": pytest.approx(93.75 - 96.875),
    }
    assert [leads[method]["Intervals apart"] for method in ("ACT", "ACT + retrieval prompt")] == [True, False]
    assert [leads[method]["Whole trainings"] for method in ("ACT", "ACT + retrieval prompt")] == [1, 2]
    assert "leads" not in tables.report(Reading(tuple(played(ACT, "Tool", [1, 2]))))


def test_trainings_with_the_same_seed_are_pairs():
    """Student's interval of 40, 20 and 30 points by hand: 30 ± 4.303 * 10 / sqrt(3)."""
    right, wrong = [Decision("a", 1, 40, 50, 1)], [Decision("a", 1, 40, 50, 0)]
    rollouts = played(TRACE, "Tool", [2, 2], stages=10, training_seed=1)  # has no pair
    for seed, (ours, other) in {0: (9, 5), 2: (5, 3), 3: (8, 5)}.items():
        rollouts += played(TRACE, "Tool", [ours - 1, ours + 1], stages=10, training_seed=seed, decisions=right)
        rollouts += played(ACT, "Tool", [other], stages=10, training_seed=seed, decisions=wrong if seed else right)
    rollouts += played(RETRIEVAL, "Tool", [1], stages=10) + played(DIFFUSION, "Tool", [1], stages=10)
    rollouts += [replace(x, encoder="another") for s in (0, 2) for x in played(GRU, "Tool", [1], training_seed=s)]
    pairs = tables.report(Reading(tuple(rollouts)))["pairs"]
    ((name, (progress, count), (firsts, _)),) = (
        pairs.rows
    )  # one pair is none; no TRACE with that policy; other encoders
    assert (name, count) == ("ACT", 3)
    half = 4.30265 * 10 / math.sqrt(3)
    assert (progress.mean, progress.low, progress.high) == pytest.approx((30, 30 - half, 30 + half), abs=1e-3)
    assert firsts.mean == pytest.approx(200 / 3)
    assert "| ACT | +30.0 [5.2, 54.8] (3) | +66.7 [-76.8, 210.1] (3) |" in tables.markdown({"pairs": pairs})


def test_pairs_need_every_task_and_a_decision():
    rollouts = [each for task in ("Tool", "Book") for s in (0, 1) for each in played(TRACE, task, [4], training_seed=s)]
    rollouts += [each for s in (0, 1) for each in played(ACT, "Tool", [2], training_seed=s)]
    assert "pairs" not in tables.report(Reading(tuple(rollouts)))  # ACT has not played Book
    rollouts += [each for s in (0, 1) for each in played(ACT, "Book", [1 + s], training_seed=s)]
    ((_, (progress, count), firsts),) = tables.report(Reading(tuple(rollouts)))["pairs"].rows
    assert (progress.mean, count, firsts) == (pytest.approx(100 - (37.5 + 50) / 2), 2, None)  # nobody has decided


def test_leads_over_trainings_are_welchs():
    """By hand: 90, 80 and 70 less 50 and 40 have 35 ± t * sqrt(100 / 3 + 50 / 2), Welch's t for 2.88 degrees."""
    rollouts = [x for s, n in enumerate((9, 8, 7)) for x in played(TRACE, "Tool", [n], stages=10, training_seed=s)]
    rollouts += [x for s, n in enumerate((5, 4)) for x in played(ACT, "Tool", [n], stages=10, training_seed=s + 5)]
    leads = {row[0]: row[-1] for row in tables.report(Reading(tuple(rollouts)))["leads"].rows}
    error = (100 / 3 + 50 / 2) ** 0.5
    degrees = error**4 / ((100 / 3) ** 2 / 2 + (50 / 2) ** 2 / 1)
    half = 3.25718 * error
    assert degrees == pytest.approx(2.8824, abs=1e-3)
    assert (leads["ACT"].low, leads["ACT"].high) == pytest.approx((35 - half, 35 + half), abs=1e-3)
    assert leads["TRACE Regression"] is None


def test_where_nothing_differs_there_is_no_interval():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stats.student([29.9, 80.1 - 50.2, 90.3 - 60.4]) == Estimate(pytest.approx(29.9))
        assert stats.student([1.0]) is None
        assert stats.student([1.0, 2.0], []) is None  # nothing to compare with, and not a comparison with nothing


def test_caption_shows_unequal_numbers():
    rollouts = played(ACT, "Tool", [1, 2]) + played(ACT, "Tool", [1], training_seed=1) + played(TRACE, "Tool", [1, 2])
    text = tables.markdown(tables.report(Reading(tuple(rollouts))))
    assert "5 rollouts: 1 to 2 a method, task and training seed. Training seeds a method: 1 to 2." in text


def test_missing_cells_are_dashes_and_never_averaged():
    lacking = [each for each in papers() if (each.method, each.record.task) != (TRACE, "Book")]
    made = tables.report(Reading(tuple(lacking)))
    main, left = (
        {row["Method"]: row for row in tables.to_json(made)[key]["rows"]} for key in ("main", "leave_one_task_out")
    )
    assert main["TRACE Regression"]["Book"] is None
    assert main["TRACE Regression"]["Average"] is None
    assert main["TRACE Diffusion"]["Average"]["mean"] == pytest.approx(59.53, abs=0.01)
    assert left["TRACE Regression"]["Drop Book"]["mean"] == pytest.approx(65.79, abs=0.01)  # needs no Book
    assert [name for name, cell in left["TRACE Regression"].items() if cell is None] == [
        name for name in left["ACT"] if name not in {"Method", "Drop Book"}
    ]
    text = tables.markdown(made)
    line = next(each for each in text.split("\n") if each.startswith("| TRACE Regression"))
    assert line.split(" | ")[2] == DASH
    assert line.endswith(f"| {DASH} |")
    assert "TRACE Regression: no rollouts of Book, hence no average." in text
    average = next(each for each in text.split("\n") if each.startswith("| TRACE Diffusion")).split(" | ")[-2]
    assert average.startswith("**59.5 ± ")  # the best of those that have one


def test_missing_seeds_and_tasks_are_said():
    rollouts = (
        played(ACT, "Book", [1, 2]) + played(ACT, "Cable", [1, 2]) + played(ACT, "Cable", [3, 4], training_seed=2)
    )
    made = tables.report(Reading(tuple(rollouts)))
    text = tables.markdown(made)
    assert "Averages are over 2 of the suite's 5 tasks; no rollouts of Tool, Laundry, Medicine." in text
    assert "ACT: no rollouts of Book with training seed 2." in text
    assert "Left out: there are no Tool rollouts." in text
    assert made["tool"].rows == []
    assert [*made["leave_one_task_out"].columns] == ["Method", "All tasks", "Drop Book", "Drop Cable"]


def test_one_task_alone():
    made = tables.to_json(tables.report(Reading(tuple(played(ACT, "Tool", [1, 2])))))
    assert made["leave_one_task_out"]["rows"][0]["Drop Tool"] is None
    assert made["tool"]["rows"][0]["Drop-Tool average"] is None
    assert made["tool"]["rows"][0]["Tool mean ± SE"]["mean"] == 37.5


def test_every_memory_has_a_name_and_rows_keep_their_order():
    every = results.methods()
    assert set(every) == {(policy, memory) for policy in ("act", "diffusion") for memory in of_policies()}
    assert len({results.label(method) for method in every}) == len(every) == 2 * len(of_policies())
    rollouts = [each for method in reversed(every) for each in played(method, "Cable", [1, 1])]
    names = [*table_of(rollouts, "main")]
    assert names == [results.label(method) for method in every]
    assert names[:7] == [
        "ACT",
        "Diffusion Policy",
        "TRACE Regression",
        "TRACE Diffusion",
        "ACT + TRACE, paper's form",
        "ACT + GRU",
        "ACT + transformer context",
    ]
    assert names[17:19] == ["ACT + no auxiliary losses", "Diffusion + TRACE, paper's form"]


def test_an_average_of_shares_has_an_interval_also_where_all_are_whole():
    """By hand for two tasks (MOVER): half of the root of the summed squares of the distances to Wilson's ends."""
    full, half = stats.share([True] * 10), stats.share([True] * 5 + [False] * 5)
    both, whole = stats.balanced([full, half]), stats.balanced([full, full])
    assert (both.percent, both.count, both.of) == (75.0, 15, 20)
    assert both.low == pytest.approx(75 - math.hypot(100 - full.low, 50 - half.low) / 2)
    assert both.high == pytest.approx(75 + math.hypot(full.high - 100, half.high - 50) / 2)
    assert (whole.percent, whole.high) == (100.0, 100.0)
    assert whole.low == pytest.approx(100 - (100 - full.low) / math.sqrt(2))
    assert stats.balanced([half]) == half


def test_the_figure_shows_chance_intervals_and_the_memories_colours(tmp_path):
    right, wrong = [Decision("a", 1, 40, 50, 1)], [Decision("a", 0, 40, 50, 1)]
    rollouts = played(TRACE, "Tool", [4, 3], decisions=right) + played(DIFFUSION, "Tool", [1, 2], decisions=wrong)
    tables.draw(Reading(tuple(rollouts)), tmp_path / "a.svg")
    tables.draw(Reading(tuple(rollouts[::-1])), tmp_path / "b.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text()
    for words in ("chance", "TRACE Regression", "Diffusion Policy", "Tool", "first branch right, % with 95 % interval"):
        assert f">{words}<" in picture
    assert "A colour is a memory, the same in all figures. Hatched: Diffusion Policy." in picture
    assert all(METHODS[memory].colour in picture for memory in ("trace", "none"))
    one = tables.draw(Reading(tuple(rollouts[:2])), tmp_path / "c.svg")  # one answer: nobody knows what a guess gets
    assert one is None
    assert ">chance<" not in (tmp_path / "c.svg").read_text()


def test_the_same_lines_give_the_same_bytes():
    """In any order, and in another process."""
    rollouts = papers()
    first, again = (tables.report(Reading(tuple(each))) for each in (rollouts, rollouts[::-1]))
    assert tables.markdown(first) == tables.markdown(again)
    assert json.dumps(tables.to_json(first)) == json.dumps(tables.to_json(again))
    code = "import numpy as np; from trace_lab.stats import estimate; print(estimate([(1.0, np.arange(9.0))]))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(stats.estimate([(1.0, np.arange(9.0))]))


def test_no_learning_library_is_imported():
    code = "import sys, trace_lab.tables, trace_lab.report; heavy = {'torch', 'lerobot', 'scipy.stats', 'matplotlib'}; "
    code += "sys.exit(bool(heavy & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_signal_is_told_of_but_not_averaged_with_the_suite():
    mixed = played(ACT, "Tool", [4, 4]) + played(ACT, "Signal", [0, 0], first=5)
    made = tables.report(Reading(tuple(mixed), ()))
    (line,) = made["main"].rows
    assert list(made["main"].columns)[1:3] == ["Tool", "Average"]
    assert line[2].mean == 100
    assert [row[1] for row in made["failures"].rows] == ["Tool", "Signal"]
    (alone,) = tables.report(Reading(tuple(mixed[2:]), ()))["main"].rows
    assert alone[2].mean == 0
