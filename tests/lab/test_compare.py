"""The comparison: the right steps in the right order, nothing twice, failures told; packed by what was measured."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from trace_bench.registry import VERSIONS

from trace_lab import compare as compare_module
from trace_lab import packing
from trace_lab.cli import main
from trace_lab.compare import GROUPS, Plan, collected, method, methods_of, steps_of, work
from trace_lab.packing import Packed, choose
from trace_lab.recipe import RecipeError
from trace_lab.runners import Here, OnRay
from trace_memory.config import MEMORIES

SHEET = {
    "split": "heldout", "cue": 0, "delay": 60, "cue_gone": 10, "steps": 100, "drops": 0, "outcome": "timeout",
}  # fmt: skip


def plan(tmp_path, tasks=("Cable",), methods=(("act", "none"), ("act", "trace")), seeds=(0,)) -> Plan:
    return Plan(tmp_path, tasks, methods, seeds, "tiny", ("steps=4",), 3, 64, 2, tmp_path / "data")


class Fake:
    """Does what the commands would leave behind, and notes when."""

    def __init__(self, fail: str = "", room: int = 4):
        self.pool, self.fail, self.room = ThreadPoolExecutor(room), fail, room
        self.begun, self.ended, self.lock = [], [], threading.Lock()

    def submit(self, command, log) -> Future:
        return self.pool.submit(self.run, command, log)

    def run(self, command, log) -> int:
        with self.lock:
            self.begun.append((command, list(self.ended)))
        log.parent.mkdir(exist_ok=True)
        log.write_text("some words\nthe last words\n")
        time.sleep(0.02)
        if self.fail and self.fail in " ".join(command):
            return 1
        getattr(self, command[0])(command)
        with self.lock:
            self.ended.append(command)
        return 0

    def collect(self, command) -> None:
        folder = self.value(command, "--out") / "meta"
        folder.mkdir(parents=True)
        note = folder / "trace_bench.tmp"  # there at once, as the real one: others look at it all the time
        told = {"episodes": int(self.text(command, "--episodes")), "task": command[1], "suite": VERSIONS[command[1]]}
        note.write_text(json.dumps(told))
        note.rename(folder / "trace_bench.json")

    def train(self, command) -> None:
        (self.value(command, "--out") / "checkpoints" / "000004").mkdir(parents=True)
        if self.value(command, "--out").parent.name == "encoder":
            note = {"asked": {"recipe": {"branches": 0 if "branches=0" in command else 1}}}
            (self.value(command, "--out") / "run.json").write_text(json.dumps(note))

    def eval(self, command) -> None:
        task, run = self.text(command, "--task"), command[1]
        folder = compare_module.Path(run) / "evaluation" / task
        folder.mkdir(parents=True)
        policy, memory = compare_module.Path(run).parent.name.split("+")
        progress = 0.5 if memory == "none" else 1.0
        rows = [
            SHEET
            | {"task": task, "seed": seed, "policy": policy, "memory": memory, "training_seed": 0, "progress": progress}
            | {"stages": {"a": 1, "b": None if memory == "none" else 2}}
            | {"decisions": [{"name": "b", "answer": 0, "frame": 1, "step": 2, "choice": 0, "correct": True}]}
            for seed in range(2)
        ]
        (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @staticmethod
    def text(command, name) -> str:
        return command[command.index(name) + 1]

    def value(self, command, name):
        return compare_module.Path(self.text(command, name))


def run(made: Plan, fake: Fake) -> dict:
    from rich.console import Console

    return work(steps_of(made, 1), fake, made.out, Console(stderr=True, quiet=True))


def test_each_step_after_what_it_needs_and_none_twice(tmp_path):
    made, fake = plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1)), Fake()
    assert run(made, fake) == {}
    assert len(fake.begun) == len(set(fake.ended)) == 2 + 2 * 2 * 2 * 2
    for command, ended in fake.begun:
        names = [each[0] for each in ended]
        if command[0] == "train":
            assert any(each[0] == "collect" and Fake.text(each, "--out") == command[1] for each in ended), names
        if command[0] == "eval":
            assert any(each[0] == "train" and Fake.text(each, "--out") == command[1] for each in ended), names
        if command[0] == "collect":  # one at a time: it uses all cores
            before = [c for c, _ in fake.begun[: fake.begun.index((command, ended))] if c[0] == "collect"]
            assert all(each in ended for each in before)
    assert run(made, nothing := Fake()) == {}
    assert nothing.begun == []
    assert run(plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1, 2)), more := Fake()) == {}
    assert sorted(command[0] for command, _ in more.begun) == ["eval"] * 4 + ["train"] * 4


def test_what_is_trained_is_evaluated_before_more_is_trained(tmp_path):
    """So that a comparison that runs out of time has results of what it did."""
    made, fake = plan(tmp_path, seeds=(0, 1)), Fake(room=1)
    assert run(made, fake) == {}
    assert [command[0] for command, _ in fake.begun] == ["collect", *["train", "eval"] * 4]


def test_methods_share_an_encoder_that_is_trained_once(tmp_path):
    methods = (("act", "none"), ("act", "trace"), ("diffusion", "trace"))
    made, fake = replace(plan(tmp_path, tasks=("Cable", "Medicine"), methods=methods), encoder=4), Fake()
    assert run(made, fake) == {}
    trainings = [(command, ended) for command, ended in fake.begun if command[0] == "train"]
    encoders = {Fake.text(c, "--out"): c for c, _ in trainings if "--encoder" not in c}
    assert len(encoders) == 2
    assert all("steps=4" in command and "backbone=frozen" not in command for command in encoders.values())
    assert all("branches=0" in command for command in encoders.values())
    methods = [(command, ended) for command, ended in trainings if Fake.text(command, "--out") not in encoders]
    assert len(methods) == 6
    for command, ended in methods:
        start = encoders[Fake.text(command, "--encoder")]
        assert start in ended
        assert start[1] == command[1]  # the same data
        assert Fake.text(start, "--policy") == "act"  # which Diffusion Policy takes, too
        assert Fake.text(start, "--memory") == "none"
        assert "backbone=frozen" in command
    assert made.made("act", "trace").backbone == "frozen"


def test_all_of_a_seed_comes_before_the_next(tmp_path):
    made = plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1))
    order = [step.name for step in steps_of(made, 1) if step.kind == "train"]
    cells = [f"{task}: act+{memory}, seed" for memory in ("none", "trace") for task in ("Cable", "Medicine")]
    assert order == [f"{cell} {seed}" for seed in (0, 1) for cell in cells]


def test_data_of_another_version_of_the_suite_do_not_count(tmp_path):
    (tmp_path / "meta").mkdir()
    for version, count in ((VERSIONS["Book"], 3), (VERSIONS["Book"] - 1, 0)):
        note = {"episodes": 3, "suite": version, "task": "Book"}
        (tmp_path / "meta" / "trace_bench.json").write_text(json.dumps(note))
        assert collected(tmp_path) == count


def test_encoders_of_another_comparison_are_used(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = replace(plan(tmp_path / "first", methods=(("act", "none"),)), encoder=4)
    assert run(first, Fake()) == {}
    made, fake = replace(plan(tmp_path / "second"), encoders=first.out), Fake()
    assert run(made, fake) == {}
    trainings = [command for command, _ in fake.begun if command[0] == "train"]
    assert len(trainings) == 2
    for command in trainings:
        assert Fake.text(command, "--encoder") == str(first.out / "cable" / "encoder" / "act")
        assert "backbone=frozen" in command
    words = ["compare", "--out", str(tmp_path / "third"), "--tasks", "Cable", "Tool", "--methods", "act+gru"]
    for branches in (0, 1):
        note = {"asked": {"recipe": {"branches": branches}}}
        (first.out / "cable" / "encoder" / "act" / "run.json").write_text(json.dumps(note))
        assert main([*words, "--encoders", str(first.out)]) == 2
        told = capsys.readouterr()
        assert "no trained policy there; compare --encoder makes them" in told.err
        assert ("by heart" in " ".join(told.out.split())) == (branches == 1)
    assert main([*words, "--encoders", str(first.out), "--encoder", "5"]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_failure_is_told_and_only_what_needs_it_is_left(tmp_path):
    made, fake = plan(tmp_path), Fake(fail="--memory trace")
    failed = run(made, fake)
    assert sorted(failed) == ["Cable: act+trace, seed 0", "Cable: act+trace, seed 0, evaluation"]
    assert [command[0] for command in fake.ended] == ["collect", "train", "eval"]
    assert "the last words" in next(iter(failed.values())).read_text()
    assert run(made, again := Fake()) == {}
    assert [command[0] for command in again.ended] == ["train", "eval"]


def test_a_machine_that_goes_away_is_a_failure_like_others(tmp_path, monkeypatch):
    fake = Fake()
    real = fake.train

    def train(command):
        if "trace" in command:
            raise ConnectionError("the node died")
        real(command)

    monkeypatch.setattr(fake, "train", train)
    failed = run(plan(tmp_path), fake)
    assert sorted(failed) == ["Cable: act+trace, seed 0", "Cable: act+trace, seed 0, evaluation"]


def test_the_command_writes_tables_and_refuses_other_settings(tmp_path, monkeypatch, capsys):
    fake = Fake()
    monkeypatch.setattr(compare_module, "Here", lambda *_: _Context(fake))
    out = tmp_path / "out"
    words = ["compare", "--out", str(out), "--tasks", "cable", "--methods", "act", "act+trace", "--preset", "tiny",
             "--demonstrations", "3", "--runner", "here", "--jobs", "2", "--episodes", "2", "--set", "steps=4"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((out / "tables.json").read_text()) == printed
    assert "TRACE Regression" in (out / "tables.md").read_text()
    assert "50.0" in (out / "tables.md").read_text()
    kept = (out / "compare.json").read_bytes()
    assert main([*words[:-1], "steps=5"]) == 2
    assert "comparison with other settings (changes was ['steps=4'], now ['steps=5'])" in capsys.readouterr().err
    assert (out / "compare.json").read_bytes() == kept
    told = json.loads(kept)
    told["recipes"]["act+trace"]["policy_options"]["chunk_size"] = 7  # a preset of before
    (out / "compare.json").write_text(json.dumps(told))
    assert main(words) == 2
    assert "other settings (act+trace.policy_options.chunk_size was 7, now 40)" in capsys.readouterr().err
    (out / "compare.json").write_bytes(kept)
    assert main([*words, "--plan-only"]) == 0
    assert capsys.readouterr().out.count("done: ") == 5


class _Context:
    def __init__(self, fake):
        self.fake = fake

    def __enter__(self):
        return self.fake

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tasks", "cabel"], "there is no task 'cabel'; did you mean 'Cable'?"),
        (["--methods", "atc+trace"], "method: there is no 'atc'; did you mean 'act'?"),
        (["--methods", "act+tarce"], "there is no 'tarce'; did you mean 'trace'?"),
        (["--preset", "small"], "preset: there is no 'small'"),
        (["--jobs", "0"], "jobs: got 0, expected 1 or more"),
        (["--encoder", "-1"], "encoder: got -1, expected a number of updates"),
    ],
)
def test_unknown_names_are_told_with_the_nearest(tmp_path, capsys, words, expected):
    assert main(["compare", "--out", str(tmp_path / "out"), *words]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(tmp_path, capsys):
    (tmp_path / "precious").touch()
    assert main(["compare", "--out", str(tmp_path), "--tasks", "cable"]) == 2
    assert "is not empty and has no compare.json" in capsys.readouterr().err


def test_groups_of_methods():
    assert methods_of(["main", "act", "act+gru"])[:2] == (("act", "none"), ("diffusion", "none"))
    assert len(methods_of(["main", "act"])) == 4
    assert {memory for _, memory in methods_of(["all"])} == set(MEMORIES)
    assert len(methods_of(GROUPS)) == 2 * len(MEMORIES)
    assert method("diffusion+lru") == ("diffusion", "lru")
    with pytest.raises(RecipeError):
        method("")


@pytest.mark.parametrize("kind", ["here", "ray"])
def test_real_processes(tmp_path, kind):
    with Here(2, 1) if kind == "here" else OnRay(1, 1, None) as runner:
        good = runner.submit(("--version",), tmp_path / "logs" / "good.log")
        bad = runner.submit(("parms",), tmp_path / "logs" / "bad.log")
        assert good.result(timeout=120) == 0
        assert bad.result(timeout=120) == 2
    assert (tmp_path / "logs" / "good.log").read_text().startswith("$ tracemem --version\n0.")
    assert "did you mean 'params'" in (tmp_path / "logs" / "bad.log").read_text()


# -- packing ---------------------------------------------------------------------------------------------------------------


def test_the_fewest_that_do_nearly_the_most_are_chosen():
    rows = lambda *totals: [Packed(n, total, total / n, 0) for n, total in zip((1, 4, 8), totals, strict=True)]  # noqa: E731
    assert choose(rows(100, 300, 310)) == 4
    assert choose(rows(100, 300, 400)) == 8
    assert choose(rows(100, 90, 80)) == 1
    assert choose(rows(100, 102, 115)) == 8


def test_what_was_measured_is_used_only_on_such_a_device(tmp_path):
    note = tmp_path / "packing.json"
    assert packing.load(note, "cpu") is None
    note.write_text(json.dumps({"device": "cpu", "rows": [vars(Packed(1, 2.0, 2.0, 0))]}))
    assert packing.load(note, "cpu") == [Packed(1, 2.0, 2.0, 0)]
    assert packing.load(note, "NVIDIA H200") is None


def test_trainings_are_measured_side_by_side(dataset, monkeypatch):
    jobs, begin = [], packing._begin
    monkeypatch.setattr(packing, "_begin", lambda *given: jobs.append(begin(*given)) or jobs[-1])
    small = [
        "preset=tiny",
        "episodes=1",
        "targets=2",
        "policy.dim_model=32",
        "policy.n_heads=2",
        "memory.update_every=64",
    ]
    (row,) = packing.measure(dataset, (2,), small, seconds=0.5)
    assert row.count == 2
    assert row.failed == 0
    assert row.total == pytest.approx(2 * row.each, abs=0.2)
    assert row.total > 0
    assert [job.returncode for job in jobs] == [0, 0]  # killed at work, one would take others on the GPU with it


def test_trainings_that_do_not_fit_are_told(tmp_path):
    class Dead:
        def poll(self):
            return 1

    assert packing._together(4, [0, 2, 3], [Dead()] * 4, tmp_path, 1.0) == Packed(4, 0.0, 0.0, 1)
    assert packing._together(2, [0, 1], [Dead()] * 2, tmp_path, 1.0) == Packed(2, 0.0, 0.0, 2)
    assert choose([Packed(1, 5.0, 5.0, 0), Packed(4, 0.0, 0.0, 1)]) == 1
    with pytest.raises(packing.PackingError, match="not even 1 of these trainings fit here"):
        choose([Packed(1, 0.0, 0.0, 1)])


def test_trainings_that_do_not_run_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(packing.sys, "executable", "/bin/false")
    with pytest.raises(packing.PackingError, match=r"no training of .* ran here: it said nothing"):
        packing.measure(tmp_path, (1, 4), seconds=0.5)


def test_compare_measures_once(tmp_path, monkeypatch):
    made, measured = plan(tmp_path), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(compare_module, "Here", lambda *_: _Context(Fake()))

    def measure(data, settings):
        measured.append((data, settings))
        return [Packed(1, 10.0, 10.0, 0), Packed(4, 30.0, 7.5, 0)]

    monkeypatch.setattr(packing, "measure", measure)
    from rich.console import Console

    for _ in range(2):
        assert compare_module.fit(made, tmp_path, Console(quiet=True)) == 4
    assert measured == [(tmp_path / "data" / "cable", ["preset=tiny", "policy=act", "memory=trace", "steps=4"])]
