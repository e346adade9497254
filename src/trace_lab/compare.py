"""`tracemem compare`: tasks by methods by training seeds. Demonstrations are collected once a task, every method is trained
and evaluated on the same episodes; what is finished is never done again, and it ends with its tables. The work itself is
done by `collect`, `train` and `eval`, as jobs of a `queue`.
"""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markdown import Markdown

from trace_bench.tasks import TASKS, load, of_suite
from trace_errors import RunError, UsageError
from trace_lab.jobs import listing, say, work
from trace_lab.queue import Job, Local, OnRay, Queue
from trace_lab.recipe import POLICIES, Recipe, known, parse, recipe
from trace_lab.results import RESULTS, Method, Reading, Rollout, whole, write
from trace_lab.tables import draw, markdown, report, to_json
from trace_memory.registry import METHODS, of_policies

# Core seconds, to plan with until something has been measured: on one busy core of 2025, and beside one H200.
EPISODE = {"collect": 8.0, "eval": 8.0}  # of one episode
TARGET = {"tiny": 0.01, "default": 0.6, "paper": 0.6}  # of one target of an update on a CPU
TARGET_GPU = 0.001  # the same on a GPU
GPU_JOBS = 8  # at once on one GPU, if there are twice as many cores: more brought nothing more when it was measured


@dataclass(frozen=True)
class Plan:
    """All that decides the results."""

    out: Path
    tasks: tuple[str, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    preset: str
    changes: tuple[str, ...]  # NAME=VALUE
    demonstrations: int | None
    size: int
    episodes: int
    data: Path

    def made(self, policy: str, memory: str) -> Recipe:
        """How a method is trained; the same for all but for the method itself."""
        return recipe(self.preset, policy, memory, parse(self.changes))

    @property
    def fixed(self) -> dict[str, Any]:
        """What all cells of a folder must share. Tasks, methods and seeds may be added to."""
        return {
            "preset": self.preset,
            "changes": sorted(self.changes),
            "demonstrations": self.demonstrations,
            "size": self.size,
            "suite": {name: entry.version for name, entry in TASKS.items()},
        }

    def run(self, task: str, method: Method, seed: int) -> Path:
        """The folder of a training."""
        return self.out / task.lower() / "+".join(method) / f"seed{seed}"

    @property
    def command(self) -> str:
        """The command that makes it, without this machine's folders."""
        words = ["tracemem compare --out OUT", "--tasks", *self.tasks, "--methods", *map("+".join, self.methods)]
        words += ["--seeds", *map(str, self.seeds), "--preset", self.preset]
        words += ["--set", *self.changes] if self.changes else []
        words += ["--demonstrations", str(self.demonstrations)] if self.demonstrations else []
        return " ".join([*words, f"--size {self.size} --episodes {self.episodes}"])


# -- methods ---------------------------------------------------------------------------------------------------------------


def groups() -> dict[str, list[str]]:
    """Names for several methods at once."""
    kinds = {kind: [name for name in of_policies() if METHODS[name].kind == kind] for kind in ("baseline", "ablation")}
    return {
        "main": ["act", "diffusion", "act+trace", "diffusion+trace"],
        "baselines": [f"act+{name}" for name in kinds["baseline"]],
        "ablations": [f"act+{name}" for name in kinds["ablation"]],
        "all": [f"{policy}+{name}" for policy in POLICIES for name in of_policies()],
    }


def method(name: str) -> Method:
    """A policy and a memory, by name.

    Example:
        >>> method("diffusion+gru")
        ('diffusion', 'gru')
    """
    policy, _, memory = name.partition("+")
    return known("method", policy, list(POLICIES)), known(f"method {policy}+", memory or "none", of_policies())


def methods_of(names: Sequence[str]) -> tuple[Method, ...]:
    """Methods and groups of methods, each once."""
    all_ = groups()
    return tuple(dict.fromkeys(method(each) for name in names for each in all_.get(name, [name])))


# -- jobs ------------------------------------------------------------------------------------------------------------------


def jobs_of(plan: Plan, *, workers: int = 1, gpu: bool = False) -> list[Job]:
    """The jobs in the order of their urgency: all of a seed before the next, each evaluation before more trainings, each
    collection before the first training that needs it.
    """
    jobs: dict[str, Job] = {}
    for seed, each, task in product(plan.seeds, plan.methods, plan.tasks):
        data = collection(plan, task, workers)
        jobs.setdefault(data.name, data)
        for job in cell(plan, task, each, seed, workers, gpu=gpu):
            jobs[job.name] = job
    return list(jobs.values())


def name_of(task: str, method: Method, seed: int) -> str:
    """The name of a training."""
    return f"{task}: {'+'.join(method)}, seed {seed}"


def evaluation_of(training: str) -> str:
    """The name of its evaluation."""
    return f"{training}, evaluation"


def collection(plan: Plan, task: str, workers: int) -> Job:
    """The demonstrations of a task."""
    data = plan.data / task.lower()
    count = plan.demonstrations or TASKS[task].demonstrations
    command = ("collect", task, "--episodes", str(count), "--size", str(plan.size), "--out", str(data))
    hours = count * EPISODE["collect"] / 3600
    return Job(f"{task}: collect", command, (), ("--workers", str(workers)), str(data / "meta" / "info.json"), hours)


def cell(plan: Plan, task: str, method: Method, seed: int, workers: int, *, gpu: bool) -> list[Job]:
    """Training and evaluation of one method on one task with one seed."""
    policy, memory = method
    name, run = name_of(task, method, seed), plan.run(task, method, seed)
    train = (
        *("train", str(plan.data / task.lower()), "--out", str(run), "--policy", policy, "--memory", memory),
        *("--preset", plan.preset, "--seed", str(seed)),
        *(("--set", *plan.changes) if plan.changes else ()),
    )
    cache = ("--cache", str(plan.data / "frames" / task.lower()))  # after --set, whose words end at the next option
    evaluate = ("eval", str(run), "--task", task, "--episodes", str(plan.episodes))
    made = plan.made(policy, memory)
    target = TARGET_GPU if gpu else TARGET.get(plan.preset, TARGET["default"])
    last, played = run / "checkpoints" / "last", run / "evaluation" / task / RESULTS
    cost = made.steps * made.batch * target / 3600, plan.episodes * EPISODE["eval"] / 3600
    options = ("--workers", str(workers))
    return [
        Job(name, train, (f"{task}: collect",), cache, str(last), cost[0]),
        Job(evaluation_of(name), evaluate, (name,), options, str(played), cost[1]),
    ]


# -- doing it --------------------------------------------------------------------------------------------------------------


def check_folder(plan: Plan) -> None:
    """The folder is new, or one of the same settings; then notes what was asked for."""
    from trace_lab.run import commit, differences, versions, write_json

    note = plan.out / "compare.json"
    recipes = {f"{policy}+{memory}": plan.made(policy, memory).to_dict() for policy, memory in plan.methods}
    if note.exists():
        kept, fixed = json.loads(note.read_text()), json.loads(json.dumps(plan.fixed))
        before = {name: each for name, each in kept["recipes"].items() if name in recipes}
        now = json.loads(json.dumps({name: recipes[name] for name in before}))
        if differ := differences(kept["fixed"], fixed) or differences(before, now):
            raise UsageError(
                f"--out: {plan.out} is a comparison with other settings ({'; '.join(differ)}); choose another folder, or "
                "the same settings. Tasks, methods, seeds and rollouts may be added to"
            )
        recipes = kept["recipes"] | recipes
    elif plan.out.exists() and any(plan.out.iterdir()):
        raise UsageError(f"--out: {plan.out} is not empty and has no compare.json, expected a new folder")
    plan.out.mkdir(parents=True, exist_ok=True)
    write_json(note, {"fixed": plan.fixed, "recipes": recipes, "commit": commit(), "versions": versions()})


# -- its tables ------------------------------------------------------------------------------------------------------------


def finish(plan: Plan, queue: Queue, console: Console) -> dict[str, Any]:
    """Writes results.parquet, results.json, tables.md and methods.svg of all cells that are done; returns the tables."""
    from trace_lab.run import versions

    if not any(plan.out.rglob(RESULTS)):
        return {}
    reading = whole(plan.out)
    lines = queue.lines()

    def known_by(each: Rollout) -> Rollout:
        """With what trained and evaluated it, without this machine's folders."""
        name = name_of(each.record.task, each.method, each.training_seed)
        made = [lines[job].job.command for job in (name, evaluation_of(name)) if job in lines]
        text = " && ".join(f"tracemem {' '.join(command)}" for command in made)
        text = text.replace(str(plan.data), "OUT/data").replace(str(plan.out), "OUT")
        return replace(each, size=each.size or plan.preset, command=text)

    reading = Reading(tuple(map(known_by, reading.rollouts)), reading.notes)
    if not reading.rollouts:
        return {}
    unfinished = [name for name, line in lines.items() if line.state != "done"]
    facts = {"decides": "", "command": [plan.command], "versions": versions(), "unfinished": unfinished}
    write(plan.out / "results.parquet", reading.rollouts, **facts)
    made = report(reading)
    (plan.out / "tables.md").write_text(markdown(made))
    draw(reading, plan.out / "methods.svg")
    console.print(Markdown(markdown({"main": made["main"]})))
    say(console, f"Wrote results.parquet, results.json, tables.md and methods.svg in {plan.out}")
    return to_json(made)


# -- the command -----------------------------------------------------------------------------------------------------------


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
    data: Path | None = None,
    jobs: int | None = None,
    address: str | None = None,
    plan_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Compares memories: collects demonstrations, trains every method on every task, lets all do the same held-out episodes.

    What is finished is never done again: stopped, killed or asked for more tasks, methods or seeds, the same command does
    what is missing. A job that fails is tried once more; its log is in OUT/logs.

    Args:
        out: folder of the comparison: data, runs, queue.jsonl, logs, results.parquet, results.json, tables.md, methods.svg.
        tasks: tasks of the suite, or all.
        methods: POLICY or POLICY+MEMORY, for instance act act+trace diffusion+gru; or main, baselines, ablations, all.
        seeds: training seeds.
        preset: of the recipe, as for tracemem train.
        set_: other numbers of the recipe, as for tracemem train.
        demonstrations: episodes a task; the paper's numbers if not said.
        size: width and height of the pictures, pixels.
        episodes: held-out rollouts of each trained policy.
        data: folder of the datasets; out/data if not said. Collections that are there are used.
        jobs: at once on each machine; if not said 1 on a CPU, and on a GPU half as many as there are cores, 8 at most.
        address: of a Ray cluster whose machines share these folders; processes of this machine if not said.
        plan_only: list the jobs and their core hours, and do nothing.
        json_: print the tables as JSON.
    """
    console = Console(stderr=json_)
    names = of_suite() if "all" in tasks else tuple(dict.fromkeys(load(task).name for task in tasks))
    for name, value in {"jobs": jobs, "episodes": episodes, "size": size, "demonstrations": demonstrations}.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name}: got {value}, expected 1 or more")
    for name, words in {"tasks": names, "methods": methods, "seeds": seeds}.items():
        if not words:
            raise UsageError(f"--{name}: got none, expected one or more")
    out = out.absolute()  # other machines begin in other folders
    place = (data or out / "data").absolute()
    plan = Plan(
        out,
        names,
        methods_of(methods),
        tuple(dict.fromkeys(seeds)),
        preset,
        set_,
        demonstrations,
        size,
        episodes,
        place,
    )
    for policy, memory in plan.methods:
        plan.made(policy, memory)
    import torch  # after all that can be wrong

    gpu, cores = torch.cuda.is_available(), len(os.sched_getaffinity(0))
    count = jobs or (max(1, min(GPU_JOBS, cores // 2)) if gpu else 1)
    threads = max(1, cores // count)
    queue, todo = Queue(out), jobs_of(plan, workers=threads, gpu=gpu)
    say(console, listing(todo, queue.lines(), threads))
    if plan_only:
        return 0
    check_folder(plan)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends it as Ctrl-C does
    try:
        left = _work(queue, todo, address, count, threads, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped. The same command goes on; finished work is in {out}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    found = finish(plan, queue, console)
    if json_:
        print(json.dumps(found))  # noqa: T201
    say(console, f"{len(todo) - len(left)} of {len(todo)} jobs done")
    if left:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3])
        raise RunError(f"{len(left)} of {len(todo)} jobs could not be done. {why}. The same command tries them again")
    return 0


def _work(
    queue: Queue, todo: Sequence[Job], address: str | None, count: int, threads: int, console: Console
) -> dict[str, str]:
    if address is None:
        return work(queue, todo, Local(count, threads), console, threads)
    cluster = OnRay(address, count, threads)
    try:
        return work(queue, todo, cluster, console, threads)
    finally:
        cluster.close()
