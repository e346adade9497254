"""`tracemem compare`: tasks by methods by training seeds. Demonstrations are collected once a task, every method is trained
and evaluated on the same episodes, several at once; what is finished is never done again. The work itself is done by
`collect`, `train` and `eval`, each step a command that `runners` run; the tables are `stats`'.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trace_bench.registry import TASKS, VERSIONS, UnknownTaskError, load
from trace_lab import lines, packing, stats
from trace_lab.collect import EPISODES, tell
from trace_lab.dataset import write_json
from trace_lab.recipe import POLICIES, Recipe, RecipeError, known, parse, recipe
from trace_lab.run import Run, RunError, commit, differences, versions
from trace_lab.runners import Here, OnRay
from trace_lab.tables import markdown, to_json

RIVALS = ("gru", "transformer", "lru", "retrieval")
ABLATIONS = ("current", "signature-only", "unrouted", "no-delta", "mean-read", "no-auxiliary")
GROUPS = {
    "main": ["act", "diffusion", "act+trace", "diffusion+trace"],
    "rivals": [f"act+{name}" for name in RIVALS],
    "ablations": [f"act+{name}" for name in ABLATIONS],
}
GROUPS["all"] = [f"{policy}+{name}" for policy in POLICIES for name in ("none", "trace", *RIVALS, *ABLATIONS)]
POLL = 2.0  # seconds between two looks at how far everything is


class CompareError(Exception):
    """The comparison cannot begin; nothing was changed."""


# -- what is to be done ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A command, what must be done before it, and how to see whether it is done."""

    name: str
    kind: Literal["collect", "train", "eval"]
    command: tuple[str, ...]
    amount: int  # episodes or updates
    progress: Callable[[], int] = field(compare=False)  # how many of them are done
    after: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.progress() >= self.amount


@dataclass(frozen=True)
class Plan:
    """All that decides the results."""

    out: Path
    tasks: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]  # policy, memory
    seeds: tuple[int, ...]
    preset: str
    changes: tuple[str, ...]  # NAME=VALUE
    demonstrations: int | None
    size: int
    episodes: int
    data: Path
    encoder: int = 0  # updates of the stock policy whose encoder all methods share
    encoders: Path | None = None  # the comparison that has these encoders already

    @property
    def settings(self) -> tuple[str, ...]:
        """NAME=VALUE of every method's training."""
        return (*self.changes, "backbone=frozen") if self.encoder or self.encoders else self.changes

    def encoder_of(self, task: str) -> Run:
        """The run whose encoder all methods have on a task: ACT's, also with Diffusion Policy, if there is one."""
        place = (self.encoders or self.out) / task.lower() / "encoder"
        trains = "act" if any(policy == "act" for policy, _ in self.methods) else "diffusion"
        there = [policy for policy in POLICIES if self.encoders and Run(place / policy).trained()]
        return Run(place / (there or [trains])[0])

    def made(self, policy: str, memory: str) -> Recipe:
        """How a method is trained; the same for all but for the method itself."""
        return recipe(self.preset, policy, memory, parse(self.settings))

    @property
    def fixed(self) -> dict[str, Any]:
        """What all cells of a folder must share. Tasks, methods and seeds may be added to."""
        from lerobot_policy_trace.recall import FORM, ROUTED

        return {
            "preset": self.preset,
            "changes": sorted(self.changes),
            "demonstrations": self.demonstrations,
            "size": self.size,
            "suite": VERSIONS,
            "contents": [FORM, ROUTED],
            "encoder": [self.encoder, self.encoder_of(self.tasks[0]).folder.name] if self.encoder else 0,
            "encoders": str(self.encoders) if self.encoders else None,
        }


def method(name: str) -> tuple[str, str]:
    """`act`, `diffusion+gru`, ...: a policy and a memory, by name."""
    from trace_memory.config import MEMORIES

    policy, _, memory = name.partition("+")
    return known("method", policy, POLICIES), known(f"method {policy}+", memory or "none", list(MEMORIES))


def methods_of(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Methods and groups of methods, each once."""
    found = [method(each) for name in names for each in GROUPS.get(name, [name])]
    return tuple(dict.fromkeys(found))


def steps_of(plan: Plan, workers: int) -> list[Step]:
    """The graph: collect a task; train the shared encoder, if there is one; train each method and seed; evaluate them."""
    steps = []
    for task in plan.tasks:
        data, count = plan.data / task.lower(), plan.demonstrations or EPISODES[task]
        command = ("collect", task, "--episodes", str(count), "--size", str(plan.size), "--out", str(data))
        steps.append(Step(f"{task}: collect", "collect", command, count, partial(collected, data)))
        if plan.encoder:
            steps.append(encoder(plan, task))
    for seed, (policy, memory), task in product(plan.seeds, plan.methods, plan.tasks):  # all of a seed before the next
        steps += cell(plan, task, policy, memory, seed, workers)
    return steps


def training(plan: Plan, task: str, run: Run, policy: str, memory: str, seed: int) -> tuple[str, ...]:
    """The command that trains a method on a task, but for its settings."""
    return (
        *("train", str(plan.data / task.lower()), "--out", str(run.folder), "--policy", policy, "--memory", memory),
        *("--preset", plan.preset, "--seed", str(seed), "--cache", str(plan.data / "frames" / task.lower())),
    )


def encoder(plan: Plan, task: str) -> Step:
    """Training of the stock policy whose encoder every method shares. It must not learn choices by heart (0009)."""
    run, settings = plan.encoder_of(task), (*plan.changes, f"steps={plan.encoder}", "branches=0")
    command = (*training(plan, task, run, run.folder.name, "none", 0), "--set", *settings)
    return Step(f"{task}: encoder", "train", command, plan.encoder, run.trained, f"{task}: collect")


def cell(plan: Plan, task: str, policy: str, memory: str, seed: int, workers: int) -> list[Step]:
    """Training and evaluation of one method on one task with one seed."""
    name = f"{task}: {policy}+{memory}, seed {seed}"
    run = Run(plan.out / task.lower() / f"{policy}+{memory}" / f"seed{seed}")
    shared = ("--encoder", str(plan.encoder_of(task).folder)) if plan.encoder or plan.encoders else ()
    settings = ("--set", *plan.settings) if plan.settings else ()
    train = (*training(plan, task, run, policy, memory, seed), *shared, *settings)
    place = run.folder / "evaluation" / task
    evaluate = ("eval", str(run.folder), "--task", task, "--episodes", str(plan.episodes), "--workers", str(workers))
    needs = f"{task}: encoder" if plan.encoder else f"{task}: collect"
    return [
        Step(name, "train", train, plan.made(policy, memory).steps, run.trained, needs),
        Step(f"{name}, evaluation", "eval", evaluate, plan.episodes, lambda: evaluated(place), name),
    ]


def collected(data: Path) -> int:
    """Episodes a dataset holds."""
    note = data / "meta" / "trace_bench.json"
    told = json.loads(note.read_text()) if note.exists() and not (data / ".collect").exists() else {}
    return int(told["episodes"]) if told and told.get("suite") == VERSIONS[told["task"]] else 0  # `collect` says why


def evaluated(place: Path) -> int:
    """Episodes played to their end."""
    results = place / "evaluation.jsonl"
    return results.read_bytes().count(b"\n") if results.exists() else 0


# -- doing it --------------------------------------------------------------------------------------------------------------


def work(steps: list[Step], runner: Any, out: Path, console: Console) -> dict[str, Path]:
    """Does what is not done, in order of need; returns the logs of steps that failed. Steps that need those are left."""
    waiting = {step.name: step for step in steps if not step.done}
    open_names = set(waiting)
    running: dict[Future[int], Step] = {}
    failed: dict[str, Path] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars = {kind: bar(progress, kind, steps) for kind in ("collect", "train", "eval")}
        while waiting or running:
            collecting = any(step.kind == "collect" for step in running.values())
            for step in sorted(waiting.values(), key=lambda step: step.kind != "eval"):  # results before more trainings
                ready = step.after not in open_names and not (step.kind == "collect" and collecting)
                if step.after in failed:
                    failed[step.name] = failed[step.after or ""]
                    del waiting[step.name]
                elif ready and len(running) < runner.room:
                    collecting |= step.kind == "collect"  # it uses all cores: one at a time
                    running[runner.submit(step.command, log_of(out, step))] = waiting.pop(step.name)
            finished, _ = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
            for future in finished:
                step = running.pop(future)
                open_names.discard(step.name)
                lost = future.exception()  # a machine that went away, for instance
                if lost or future.result() or not step.done:
                    failed[step.name] = log_of(out, step)
                    why = f"{lost!r}" if lost else f"exit code {future.result()}"
                    tell(console, f"{step.name} failed ({why}): {last_words(log_of(out, step))}")
            show(progress, bars, steps, list(running.values()))
    return failed


def bar(progress: Progress, kind: str, steps: list[Step]) -> TaskID:
    """A bar for all steps of a kind."""
    words = {"collect": "demonstrations", "train": "updates", "eval": "rollouts"}
    return progress.add_task(words[kind], total=sum(step.amount for step in steps if step.kind == kind), news="")


def show(progress: Progress, bars: dict[str, TaskID], steps: list[Step], running: list[Step]) -> None:
    """How far everything is."""
    for kind, task in bars.items():
        now = [step.name for step in running if step.kind == kind]
        done = sum(min(step.amount, step.progress()) for step in steps if step.kind == kind)
        progress.update(task, completed=done, news=f"{len(now)} begun" if now else "")


def log_of(out: Path, step: Step) -> Path:
    """Where a step's words go."""
    plain = "".join(c if c.isalnum() or c in "+-" else "_" for c in step.name.lower())
    return out / "logs" / f"{plain}.log"


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    said = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"{lines[-1][:300]} ({log})" if lines else str(log)


def fit(plan: Plan, out: Path, console: Console) -> int:
    """How many trainings at once, by measurement on this machine; what was measured is kept in packing.json."""
    import torch

    if not torch.cuda.is_available():
        return 1  # a training uses all cores of a CPU by itself
    note, device = out / "packing.json", packing.device_name()
    rows = packing.load(note, device)
    if rows is None:
        task = plan.tasks[0]
        with Here(1, os.cpu_count() or 1) as runner:
            steps = [step for step in steps_of(plan, 1) if step.name == f"{task}: collect"]
            if failed := work(steps, runner, out, console):
                raise CompareError(f"{task} could not be collected: {last_words(next(iter(failed.values())))}")
        policy, memory = plan.methods[-1]
        if plan.encoder:
            memory = "none"  # the encoders' trainings are the largest
        names = [f"preset={plan.preset}", f"policy={policy}", f"memory={memory}", *plan.changes]
        with console.status(f"measuring how many trainings at once are fastest here (kept in {note})"):
            rows = packing.measure(plan.data / task.lower(), settings=names)
        write_json(note, {"device": device, "settings": names, "rows": [vars(row) for row in rows]})
    told = ", ".join(f"{row.count}: {row.total:,.0f} targets/s" for row in rows)
    tell(console, f"trainings at once on {device}: {packing.choose(rows)} ({told})")
    return packing.choose(rows)


# -- the command -----------------------------------------------------------------------------------------------------------


def check_folder(plan: Plan) -> None:
    """The folder is new, or one of the same settings; then notes what was asked for."""
    note = plan.out / "compare.json"
    recipes = {f"{policy}+{memory}": plan.made(policy, memory).to_dict() for policy, memory in plan.methods}
    if note.exists():
        told, fixed = json.loads(note.read_text()), json.loads(json.dumps(plan.fixed))
        before = {name: Recipe().to_dict() | each for name, each in told["recipes"].items() if name in recipes}
        now = json.loads(json.dumps({name: recipes[name] for name in before}))
        if differ := differences(told["fixed"], fixed) or differences(before, now):
            raise CompareError(
                f"{plan.out} is a comparison with other settings ({'; '.join(differ)}); choose another --out, or the same "
                "settings. Tasks, methods, seeds and rollouts may be added to"
            )
        recipes = told["recipes"] | recipes
    elif plan.out.exists() and any(plan.out.iterdir()):
        raise CompareError(f"{plan.out} is not empty and has no compare.json, expected a new folder")
    plan.out.mkdir(parents=True, exist_ok=True)
    write_json(note, {"fixed": plan.fixed, "recipes": recipes, "commit": commit(), "versions": versions()})


def tables(out: Path, console: Console) -> dict[str, Any]:
    """Tables of all rollouts there are, as files and on the screen."""
    if not (reading := lines.read(out)).rollouts:
        return {}
    made = stats.report(reading)
    (out / "tables.md").write_text(markdown(made))
    write_json(out / "tables.json", to_json(made))
    console.print(Markdown(markdown({"main": made["main"]})))
    tell(console, f"Wrote {out / 'tables.md'} and {out / 'tables.json'}")
    return to_json(made)


def compare(
    *,
    out: Path,
    tasks: tuple[str, ...] = ("all",),
    methods: tuple[str, ...] = ("main",),
    seeds: tuple[int, ...] = (0,),
    preset: str = "default",
    set_: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    demonstrations: int | None = None,
    size: int = 96,
    episodes: int = 25,
    encoder: int = 0,
    encoders: Path | None = None,
    data: Path | None = None,
    runner: Literal["ray", "here"] = "ray",
    address: str | None = None,
    jobs: int | Literal["auto"] = "auto",
    plan_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Compares memories: collects demonstrations, trains every method on every task, lets all do the same held-out episodes.

    What is finished is never done again: stopped, killed or asked for more tasks, methods or seeds, the same command does
    what is missing. Several trainings share a GPU, as many as are fastest together when measured there.

    Args:
        out: folder of the comparison: data, runs, logs, tables.md, tables.json.
        tasks: tasks of the suite, or all.
        methods: POLICY or POLICY+MEMORY, for instance act act+trace diffusion+gru; or main, rivals, ablations, all.
        seeds: training seeds.
        preset: of the recipe: default, paper or tiny.
        set_: other numbers of the recipe, as for tracemem train.
        demonstrations: episodes a task; the paper's numbers if not said.
        size: width and height of the pictures, pixels.
        episodes: held-out rollouts of each trained policy.
        encoder: if not 0, the stock policy (ACT, if any method has it) is trained for so many updates on each task first;
            all methods share its encoder, which stays as it is then. Much faster than an encoder for each.
        encoders: the folder of a comparison that has trained such encoders, with any settings: its are used.
        data: folder of the datasets; out/data if not said. Collections that are there are used.
        runner: ray (this machine, or a cluster), or here: processes of this machine, without Ray.
        address: of a Ray cluster whose machines share these folders; a Ray of our own if not said.
        jobs: trainings at once on a GPU; auto measures.
        plan_only: say what would be done, and do nothing.
        json_: print the tables as JSON.
    """
    console = Console(stderr=json_)
    try:
        names = tuple(TASKS) if "all" in tasks else tuple(dict.fromkeys(load(task).name for task in tasks))
        out = out.absolute()  # other machines begin in other folders
        chosen, place = methods_of(methods), (data or out / "data").absolute()
        plan = Plan(
            out, names, chosen, tuple(dict.fromkeys(seeds)), preset, set_, demonstrations, size, episodes, place, encoder,
            encoders.absolute() if encoders else None,
        )  # fmt: skip
        for policy, memory in chosen:
            plan.made(policy, memory)
        if isinstance(jobs, int) and jobs < 1:
            raise CompareError(f"jobs: got {jobs}, expected 1 or more")
        if encoder < 0:
            raise CompareError(f"encoder: got {encoder}, expected a number of updates, or 0 for none")
        if encoder and encoders:
            raise CompareError("encoder and encoders: train them here, or use those of another comparison; not both")
        for task in names if encoders else ():
            if not (run := plan.encoder_of(task)).trained():
                raise CompareError(f"encoders: {run.folder}: no trained policy there; compare --encoder makes them")
            if json.loads((run.folder / "run.json").read_text())["asked"]["recipe"].get("branches", 1):
                tell(console, f"{run.folder}: trained without branches=0, may have {task}'s choices by heart (0009)")
        if plan_only:
            for step in steps_of(plan, 1):
                tell(console, f"{'done' if step.done else 'to do'}: {step.name}")
            return 0
        check_folder(plan)
        begun = time.perf_counter()
        count = fit(plan, out, console) if jobs == "auto" else jobs
        share = max(1, (os.cpu_count() or 1) // count)
        steps = steps_of(plan, share)
        with Here(count, share) if runner == "here" else OnRay(count, share, address) as at_work:
            failed = work(steps, at_work, out, console)
        found = tables(out, console)
    except (RecipeError, UnknownTaskError, CompareError, RunError, packing.PackingError, lines.LineError) as error:
        print(f"tracemem compare: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"tracemem compare: stopped. The same command goes on; finished work is in {out}", file=sys.stderr)  # noqa: T201
        return 130
    if json_:
        print(json.dumps(found))  # noqa: T201
    tell(console, f"{len(steps) - len(failed)} of {len(steps)} steps done, {time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0
