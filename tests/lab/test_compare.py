"""The comparison: the right jobs in the right order, nothing twice, failures told; and its tables and set at the end."""

import json
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from trace_errors import UsageError
from trace_lab import compare as module
from trace_lab import queue as queue_module
from trace_lab import results
from trace_lab.cli import main
from trace_lab.compare import Plan, groups, jobs_of, method, methods_of
from trace_lab.jobs import hours, listing, work
from trace_lab.queue import TRACEMEM, Line, Queue
from trace_memory.registry import of_policies

SHEET = {
    "split": "heldout", "cue": 0, "delay": 60, "cue_gone": 10, "steps": 100, "drops": 0, "outcome": "timeout",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(queue_module, "POLL", 0.01)


def plan(tmp_path, tasks=("Cable",), methods=(("act", "none"), ("act", "trace")), seeds=(0,)) -> Plan:
    return Plan(tmp_path, tasks, methods, seeds, "tiny", ("steps=4",), 3, 64, 2, tmp_path / "data")


@dataclass
class Begun:
    future: "Future[int]"
    place: str = "here"

    def poll(self) -> int | None:
        return self.future.result() if self.future.done() else None

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class Fake:
    """Does what the commands would leave behind, and notes when."""

    def __init__(self, fail: str = "", room: int = 4):
        self.pool, self.fail, self.room = ThreadPoolExecutor(room), fail, room
        self.begun, self.ended, self.guard = [], [], threading.Lock()

    def start(self, words, log, lock, avoid) -> Begun:
        assert tuple(words[: len(TRACEMEM)]) == TRACEMEM
        return Begun(self.pool.submit(self.run, tuple(words[len(TRACEMEM) :]), log))

    def run(self, command, log) -> int:
        with self.guard:
            self.begun.append((command, list(self.ended)))
        log.parent.mkdir(exist_ok=True)
        log.write_text("some words\nthe last words\n")
        time.sleep(0.02)
        if self.fail and self.fail in " ".join(command):
            return 1
        getattr(self, command[0])(command)
        with self.guard:
            self.ended.append(command)
        return 0

    def collect(self, command) -> None:
        folder = self.value(command, "--out") / "meta"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "info.json").touch()

    def train(self, command) -> None:
        run = self.value(command, "--out")
        (run / "checkpoints" / "last").mkdir(parents=True, exist_ok=True)
        (run / "run.json").write_text(json.dumps({"asked": {"recipe": {}}, "commit": "abc"}))

    def eval(self, command) -> None:
        task, run, count = self.text(command, "--task"), Path(command[1]), int(self.text(command, "--episodes"))
        folder = run / "evaluation" / task
        folder.mkdir(parents=True, exist_ok=True)
        policy, memory = run.parent.name.split("+")
        rows = [
            SHEET
            | {"task": task, "seed": seed, "policy": policy, "memory": memory, "training_seed": int(run.name[4:])}
            | {"stages": {"a": 1, "b": None if memory == "none" else 2}, "progress": 0.5 if memory == "none" else 1.0}
            | {"decisions": [{"name": "b", "answer": 0, "frame": 1, "step": 2, "choice": 0, "correct": True}]}
            for seed in range(count)
        ]
        (folder / "evaluation.json").write_text(json.dumps({"settings": {"episodes": count}}))
        (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @staticmethod
    def text(command, name) -> str:
        return command[command.index(name) + 1]

    def value(self, command, name) -> Path:
        return Path(self.text(command, name))


def run(made: Plan, fake: Fake) -> dict:
    return work(Queue(made.out), jobs_of(made), fake, Console(stderr=True, quiet=True))


def test_each_job_after_what_it_needs_and_none_twice(tmp_path):
    made, fake = plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1)), Fake()
    assert run(made, fake) == {}
    assert len(fake.begun) == len(set(fake.ended)) == 2 + 2 * 2 * 2 * 2
    for command, ended in fake.begun:
        names = [each[0] for each in ended]
        if command[0] == "train":
            assert any(each[0] == "collect" and Fake.text(each, "--out") == command[1] for each in ended), names
        if command[0] == "eval":
            assert any(each[0] == "train" and Fake.text(each, "--out") == command[1] for each in ended), names
    assert run(made, nothing := Fake()) == {}
    assert nothing.begun == []
    assert run(plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1, 2)), more := Fake()) == {}
    assert sorted(command[0] for command, _ in more.begun) == ["eval"] * 4 + ["train"] * 4


def test_more_episodes_are_played_and_nothing_trained_again(tmp_path):
    made = plan(tmp_path)
    assert run(made, Fake()) == {}
    assert run(replace(made, episodes=5), more := Fake()) == {}
    assert [command[0] for command, _ in more.begun] == ["eval", "eval"]


def test_what_is_trained_is_evaluated_before_more_is_trained(tmp_path):
    """So that a comparison that runs out of time has results of what it did."""
    made, fake = plan(tmp_path, seeds=(0, 1)), Fake(room=1)
    assert run(made, fake) == {}
    assert [command[0] for command, _ in fake.begun] == ["collect", *["train", "eval"] * 4]


def test_all_of_a_seed_comes_before_the_next(tmp_path):
    made = plan(tmp_path, tasks=("Cable", "Medicine"), seeds=(0, 1))
    order = [job.name for job in jobs_of(made) if job.command[0] == "train"]
    cells = [f"{task}: act+{memory}, seed" for memory in ("none", "trace") for task in ("Cable", "Medicine")]
    assert order == [f"{cell} {seed}" for seed in (0, 1) for cell in cells]


def test_every_method_has_the_same_data_seeds_and_numbers(tmp_path):
    """Their commands differ in policy and memory, and in where they write; in no option that only one of them has."""
    made = plan(tmp_path, methods=(("act", "none"), ("act", "trace"), ("diffusion", "gru")))
    trainings = [job.command for job in jobs_of(made) if job.command[0] == "train"]
    own = {"--out", "--policy", "--memory"}
    shared = [[w for last, w in zip(("", *words), words, strict=False) if last not in own] for words in trainings]
    assert shared[0] == shared[1] == shared[2]
    assert shared[0][-2:] == ["--set", "steps=4"]


def test_processes_do_not_change_what_a_job_is(tmp_path):
    made = plan(tmp_path)
    assert run(made, Fake()) == {}
    queue, nothing = Queue(tmp_path), Fake()
    assert work(queue, jobs_of(made, workers=9), nothing, Console(quiet=True)) == {}
    assert nothing.begun == []


def test_a_failure_is_tried_again_and_told_and_only_what_needs_it_is_left(tmp_path):
    made, fake = plan(tmp_path), Fake(fail="--memory trace")
    left = run(made, fake)
    assert sorted(left) == ["Cable: act+trace, seed 0", "Cable: act+trace, seed 0, evaluation"]
    assert "the last words" in left["Cable: act+trace, seed 0"]
    assert left["Cable: act+trace, seed 0, evaluation"] == "needs Cable: act+trace, seed 0"
    assert [command[0] for command in fake.ended] == ["collect", "train", "eval"]
    assert [command[0] for command, _ in fake.begun].count("train") == 3
    assert run(made, again := Fake()) == {}
    assert [command[0] for command in again.ended] == ["train", "eval"]


# -- core hours -----------------------------------------------------------------------------------------------------


def test_core_hours_are_planned_and_then_measured(tmp_path):
    jobs = jobs_of(plan(tmp_path))
    planned = hours(jobs, {})
    assert planned == {job.name: job.hours for job in jobs}
    assert planned["Cable: collect"] == pytest.approx(3 * 8 / 3600)
    first = jobs[1]
    lines = {first.name: Line(first, "done", 1, 3600 * first.hours * 3)}  # three times as long as planned
    each = hours(jobs, lines, threads=2)  # on two cores
    assert each[first.name] == pytest.approx(6 * first.hours)
    (other,) = (job for job in jobs if job.command[0] == "train" and job != first)
    assert each[other.name] == pytest.approx(6 * other.hours)
    assert each["Cable: collect"] == planned["Cable: collect"]
    text = listing(jobs, lines, 2)
    assert text.count("to do  ") == 4
    assert text.count("done   ") == 1
    assert f"4 jobs to do, {sum(each.values()) - each[first.name]:.1f} core hours (by those that are done)" in text
    assert "nothing has been measured yet" in listing(jobs, {}, 1)


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(module, "Local", lambda *_: made)
    return made


def words(out: Path) -> list[str]:
    return ["compare", "--out", str(out), "--tasks", "cable", "--methods", "act", "act+trace", "--preset", "tiny",
            "--demonstrations", "3", "--jobs", "2", "--episodes", "2", "--set", "steps=4"]  # fmt: skip


def test_it_ends_with_its_tables_and_its_set(tmp_path, fake, capsys):
    out = tmp_path / "out"
    assert main([*words(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["Method"] for row in printed["main"]["rows"]] == ["ACT", "TRACE Regression"]
    text = (out / "tables.md").read_text()
    assert "| ACT | 50.0 ± 0.0 |" in text
    assert "TRACE Regression" in (out / "methods.svg").read_text()
    reading = results.read(out / "results.parquet")
    assert len(reading.rollouts) == 4
    assert {each.commit for each in reading.rollouts} == {"abc"}
    assert {each.size for each in reading.rollouts} == {"tiny"}
    (command,) = {each.command for each in reading.rollouts if each.method == ("act", "trace")}
    assert command.startswith(
        "tracemem train OUT/data/cable --out OUT/cable/act+trace/seed0 --policy act --memory trace"
    )
    assert command.endswith("&& tracemem eval OUT/cable/act+trace/seed0 --task Cable --episodes 2")
    facts = results.manifest(out / "results.parquet")
    assert facts["unfinished"] == []
    (again,) = facts["command"]
    assert str(tmp_path) not in json.dumps(facts)
    assert again == (
        "tracemem compare --out OUT --tasks Cable --methods act+none act+trace --seeds 0 --preset tiny --set steps=4 "
        "--demonstrations 3 --size 96 --episodes 2"
    )
    before = {path: path.read_bytes() for path in out.glob("*") if path.suffix in {".parquet", ".md", ".svg"}}
    assert main(words(out)) == 0
    assert before == {path: path.read_bytes() for path in before}
    assert len(fake.begun) == 5


def test_what_could_not_be_done_is_an_error_after_the_tables(tmp_path, fake, capsys):
    fake.fail = "--memory trace"
    out = tmp_path / "out"
    assert main(words(out)) == 1
    printed = capsys.readouterr()
    assert "2 of 5 jobs could not be done. Cable: act+trace, seed 0: the last words" in printed.err
    assert "| ACT | **50.0 ± 0.0** |" in (out / "tables.md").read_text()
    unfinished = results.manifest(out / "results.parquet")["unfinished"]
    assert unfinished == ["Cable: act+trace, seed 0", "Cable: act+trace, seed 0, evaluation"]


def test_other_settings_and_other_folders_are_refused(tmp_path, fake, capsys):
    out = tmp_path / "out"
    assert main(words(out)) == 0
    kept = (out / "compare.json").read_bytes()
    assert main([*words(out)[:-1], "steps=5"]) == 2
    assert "comparison with other settings (changes was ['steps=4'], now ['steps=5'])" in capsys.readouterr().err
    assert (out / "compare.json").read_bytes() == kept
    note = json.loads(kept)
    note["recipes"]["act+trace"]["policy_options"]["chunk_size"] = 7  # a preset of before
    (out / "compare.json").write_text(json.dumps(note))
    assert main(words(out)) == 2
    assert "other settings (act+trace.policy_options.chunk_size was 7, now 40)" in capsys.readouterr().err
    note = json.loads(kept)
    note["fixed"]["suite"]["Cable"] -= 1  # demonstrations and scores of an earlier version of a task
    (out / "compare.json").write_text(json.dumps(note))
    assert main(words(out)) == 2
    assert "other settings (suite.Cable was 2, now 3)" in capsys.readouterr().err
    (out / "compare.json").write_bytes(kept)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").touch()
    assert main(words(tmp_path / "other")) == 2
    assert "is not empty and has no compare.json" in capsys.readouterr().err


def test_a_plan_lists_the_cells_with_their_core_hours_and_does_nothing(tmp_path, fake, capsys):
    out = tmp_path / "out"
    assert main([*words(out), "--plan-only"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("to do  ") == 5
    assert "5 jobs to do, 0.0 core hours (a rough plan: nothing has been measured yet)" in printed
    assert not out.exists()
    assert main(words(out)) == 0
    capsys.readouterr()
    assert main([*words(out), "--plan-only"]) == 0
    assert capsys.readouterr().out.count("done   ") == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tasks", "cabel"], "there is no task 'cabel'; did you mean 'Cable'?"),
        (["--methods", "atc+trace"], "method: there is no 'atc'; did you mean 'act'?"),
        (["--methods", "act+tarce"], "there is no 'tarce'; did you mean 'trace'?"),
        (["--preset", "small"], "preset: there is no 'small'"),
        (["--set", "stps=4"], "option: there is no 'stps'; did you mean 'steps'?"),
        (["--jobs", "0"], "--jobs: got 0, expected 1 or more"),
        (["--episodes", "0"], "--episodes: got 0, expected 1 or more"),
        (["--methods"], "--methods: got none, expected one or more"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_done(tmp_path, capsys, options, expected):
    assert main(["compare", "--out", str(tmp_path / "out"), *options]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_names_are_told_before_pytorch_is_imported(tmp_path):
    code = (
        "import sys; from trace_lab.cli import main; "
        f"code = main(['compare', '--out', {str(tmp_path / 'out')!r}, '--methods', 'act+tarce']); "
        "sys.exit(code + 10 * ('torch' in sys.modules or 'lerobot' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 2


def test_groups_of_methods():
    assert methods_of(["main", "act", "act+gru"])[:2] == (("act", "none"), ("diffusion", "none"))
    assert len(methods_of(["main", "act"])) == 4
    baselines = ("gru", "transformer", "lru", "retrieval", "delta", "ssm", "window")
    assert methods_of(["baselines"]) == tuple(("act", name) for name in baselines)
    assert {memory for _, memory in methods_of(["ablations"])} == {
        "current", "signature-only", "unrouted", "no-delta", "mean-read", "no-auxiliary",
    }  # fmt: skip
    assert {memory for _, memory in methods_of(["all"])} == set(of_policies())
    assert len(methods_of(groups())) == 2 * len(of_policies())
    assert method("diffusion+lru") == ("diffusion", "lru")
    with pytest.raises(UsageError):
        method("")


def lists() -> list[list[str]]:
    """The commands of experiments/."""
    files = sorted((Path(__file__).parents[2] / "experiments").glob("*.sh"))
    return [shlex.split(line)[1:] for file in files for line in file.read_text().splitlines() if line[:1] not in "#"]


@pytest.mark.parametrize("command", [each for each in lists() if each[0] == "compare"], ids=" ".join)
def test_the_lists_of_experiments_can_be_planned(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--plan-only"]) == 0
    assert "jobs to do" in capsys.readouterr().out
