"""Recipes: the named ones build, one way changes a number, and what is misspelt, old or makes no sense is refused at once,
by name.
"""

import itertools
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from trace_errors import UsageError
from trace_lab.cli import main
from trace_lab.recipe import GONE, MEMORY_OPTIONS, RECIPES, RENAMED, Recipe, check_name, names, parse, recipe
from trace_memory.registry import METHODS, paper_forms


def test_recipes_build_and_rates_fall():
    for by_policy in RECIPES.values():
        for policy, made in by_policy.items():
            assert made.policy == policy
            assert made.rate(0) < made.rate(made.warmup)
            assert made.rate(made.warmup) == pytest.approx(1.0)
            assert made.rate(made.steps) == pytest.approx(0.1)


def test_the_papers_recipe_has_the_papers_memory_and_lerobots_sizes():
    for policy in ("act", "diffusion"):
        made = recipe("paper", policy)
        assert (made.memory, made.path_swap, made.memory_options) == ("paper", 0.0, {})
        assert not {"dim_model", "down_dims", "chunk_size", "horizon"} & set(made.policy_options)
        assert recipe("default", policy).memory == "trace"
        assert recipe("paper", policy, "trace").memory == "trace"


def test_half_of_the_paths_are_swapped_unless_there_is_no_other_or_the_form_is_the_papers():
    for policy, preset in itertools.product(("act", "diffusion"), ("default", "tiny")):
        assert recipe(preset, policy).path_swap == 0.5
        assert recipe(preset, policy, "gru").path_swap == 0.5
        for memory in ("none", "paper", "no-auxiliary", "signature-only"):
            assert recipe(preset, policy, memory).path_swap == 0.0
        assert recipe(preset, policy, "trace", {"episodes": 1}).path_swap == 0.0
        assert recipe(preset, policy, "paper", {"scan": "budget"}).path_swap == 0.0
    assert recipe("default", "act", "paper", {"path_swap": 0.3}).path_swap == 0.3
    for memory in ("none", "signature-only"):  # nothing is addressed, or nothing else is known
        assert recipe("default", "act", memory, {"path_swap": 0.3}).path_swap == 0.0


def test_options_of_a_memory_are_named_in_one_light_table():
    from lerobot_policy_trace import MemoryOptions
    from trace_memory import PaperOptions

    mine = {each.name for each in fields(MemoryOptions)}
    assert mine == {*MEMORY_OPTIONS, "name", "paper", "lr"}  # what these are is the recipe's to say
    changes = {"width": 8, "attach": "residual", "history_frames": 4, "velocity_channels": [0], "dropout": 0}
    made = recipe(
        "tiny", "act", "paper", {f"memory.{name}": x for name, x in changes.items()} | {"memory.paper.slots": 6}
    )
    assert made.memory_options == {"hidden": 64} | changes | {"paper": {"slots": 6}}
    assert PaperOptions(**made.memory_options["paper"]).slots == 6
    assert RECIPES["tiny"]["act"].memory_options == {"width": 64, "hidden": 64}  # the table itself stays


def test_options_may_be_of_one_policy_only():
    words = {"act.dim_model": 64, "diffusion.horizon": 16, "policy.n_action_steps": 4}
    options = {policy: recipe("default", policy, "none", words).policy_options for policy in ("act", "diffusion")}
    assert (options["act"]["dim_model"], options["act"]["n_action_steps"]) == (64, 4)
    assert (options["diffusion"]["horizon"], options["diffusion"]["n_action_steps"]) == (16, 4)
    assert "horizon" not in options["act"]
    assert "dim_model" not in options["diffusion"]
    with pytest.raises(UsageError, match=r"option diffusion\.: there is no 'horizn'; did you mean 'horizon'"):
        recipe("tiny", "act", "trace", {"diffusion.horizn": 16})


# -- refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--memory", "grru"], "memory: there is no 'grru'; did you mean 'gru'?"),
        (["--policy", "atc"], "policy: there is no 'atc'; did you mean 'act'?"),
        (["--preset", "papper"], "preset: there is no 'papper'; did you mean 'paper'?"),
        (["--set", "lrr=1"], "option: there is no 'lrr'; did you mean 'lr'?"),
        (["--set", "path_sap=1"], "option: there is no 'path_sap'; did you mean 'path_swap'?"),
        (["--set", "memory.wdth=1"], "option: there is no 'memory.wdth'; did you mean 'memory.width'?"),
        (["--set", "period=4"], "option: there is no 'period'; did you mean 'memory.period'?"),
        (["--set", "memory.paper.slot=4"], "option: there is no 'memory.paper.slot'; did you mean 'memory.paper.slots'?"),
        (["--set", "memory=gru"], "memory: is the option --memory"),
        (["--set", "lr"], "--set: got 'lr', expected NAME=VALUE"),
        (["--set", "lr=-1"], "lr: got -1.0, expected a positive number"),
        (["--set", "lr=NaN"], "lr: got nan, expected a positive number"),
        (["--set", "rest_weight=0"], "rest_weight: got 0.0, expected more than 0 and at most 1"),
        (["--set", "path_swap=1.5"], "path_swap: got 1.5, expected 0 to 1"),
        (["--set", "jitter=1"], "jitter: got 1.0, expected 0 or more and less than 1"),
        (["--set", "checkpoint=0"], "checkpoint: got 0, expected 1 or more"),
        (["--set", "episodes=2.5"], "episodes: got 2.5, expected a whole number"),
        (["--set", "episodes=many"], "episodes: got 'many', expected a whole number"),
        (["--set", "memory.period=often"], "memory.period: got 'often', expected a whole number"),
        (["--set", "memory.velocity_channels=3"], "memory.velocity_channels: got 3, expected numbers, as in [0,1,2]"),
        (["--set", "backbone=frosen"], "backbone: there is no 'frosen'; did you mean 'frozen'"),
        (["--set", "scan=budget"], "scan: got budget with memory trace, expected memory paper, no-auxiliary or none"),
        (["--memory", "paper", "--set", "scan=budget", "memory.period=2"], "memory.period: got 2 with scan=budget"),
        (["--memory", "paper", "--set", "scan=budget", "path_swap=0.5"], "path_swap: got 0.5 with scan=budget"),
        (["--memory", "none", "--set", "scan=budget", "backbone=frozen"], "backbone: got frozen with scan=budget"),
        (["--set", "path_swap=0.5", "episodes=1"], "path_swap: got 0.5 with episodes=1"),
        (["--set", "memory.paper.slots=6"], "memory.paper.slots: got with memory trace, expected memory paper or"),
        (["--steps", "0"], "steps: got 0, expected 1 or more"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named(tmp_path, capsys, words, expected):
    assert main(["train", str(tmp_path / "nothing"), "--out", str(tmp_path / "run"), "--device", "cpu", *words]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("borrowed", "borrowed: is now path_swap"),
        ("still", "still: is now rest_weight"),
        ("update_every", "update_every: is now memory.period"),
        ("memory.update_every", "memory.update_every: is now memory.period"),
        ("memory.budget", "memory.budget: is now memory.history_frames"),
        ("rates", "rates: is now memory.velocity_channels"),
        ("memory.slots", "memory.slots: is now memory.paper.slots"),
        ("memory.key", "memory.key: is now memory.paper.log_signature"),
        ("memory.preset", "memory.preset: is now --preset for sizes and --memory paper for the paper's form"),
        ("walk", "walk: is gone: with path_swap"),
        ("pauses", "pauses: is gone: "),
        ("taught", "taught: is gone: "),
        ("shift", "shift: is gone: "),
        ("starts", "starts: is gone: "),
        ("truncate", "truncate: is gone: "),
        ("branches", "branches: is gone: "),
        ("memory.path", "memory.path: is gone: "),
        ("memory.clock", "memory.clock: is gone: "),
        ("policy.rest_action_steps", "policy.rest_action_steps: is gone: policy.n_action_steps is the replan interval"),
    ],
)
def test_an_old_name_is_refused_with_what_took_its_place(old, expected):
    with pytest.raises(UsageError) as refused:
        recipe("default", "act", "trace", {old: 1})
    assert str(refused.value).startswith(expected)


def test_no_old_name_is_one_of_today_and_every_new_one_is():
    today = names()
    assert not set(today) & {*RENAMED, *GONE}
    for name in RENAMED.values():
        if not name.startswith("the option") and not name.startswith("--"):
            check_name(name)


def test_a_misspelt_option_of_lerobots_is_named(dataset, tmp_path, capsys):
    words = ["train", str(dataset), "--out", str(tmp_path / "run"), "--device", "cpu", "--set", "policy.chunk_sise=3"]
    assert main(words) == 2
    assert "option policy.: there is no 'chunk_sise'; did you mean 'chunk_size'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_are_read_as_json_or_words():
    assert parse(["a=1", "b=0.5", "c=word", "d=[0,1]", "e=null", "f=x=y"]) == {
        "a": 1, "b": 0.5, "c": "word", "d": [0, 1], "e": None, "f": "x=y",
    }  # fmt: skip
    for word in ("a", "=1"):
        with pytest.raises(UsageError, match="expected NAME=VALUE"):
            parse([word])


@pytest.mark.parametrize(
    "words", [["/nowhere"], ["/nowhere", "--set", "borrowed=0.5"], ["/nowhere", "--preset", "huge"]], ids=str
)
def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(words, tmp_path):
    script = (
        "import sys; from trace_lab.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code if not {'torch', 'lerobot', 'mujoco'} & set(sys.modules) else 99)"
    )
    begun = time.process_time(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *words, "--out", str(tmp_path / "x")], capture_output=True, text=True
    )
    assert done.returncode in (1, 2), done.stderr
    assert done.stderr.startswith("tracemem train: ")
    assert "Traceback" not in done.stderr
    assert time.perf_counter() - begun[1] < 30  # 0.4 s where nothing else runs; what counts is above


# -- documented ------------------------------------------------------------------------------------------------------------


def test_every_name_is_in_the_documents_table():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [word.strip("`") for row in rows for word in row.replace(",", " ").split() if word.startswith("`")]
    own = [each.name for each in fields(Recipe) if not each.name.endswith("_options")]
    expected = {*own, *(f"memory.{name}" for name in MEMORY_OPTIONS), *(n for n in names() if ".paper." in n)}
    assert expected <= set(listed), expected - set(listed)
    assert len([word for word in listed if word in expected]) == len(expected)  # each once


def test_the_registry_says_what_a_recipe_must_know_of_a_memory():
    assert paper_forms() == ["paper", "no-auxiliary"]
    assert [name for name, method in METHODS.items() if not method.swaps_paths] == ["none", "signature-only"]
