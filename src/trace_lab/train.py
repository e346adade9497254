"""`tracemem train`: a policy, with a memory or without, on a LeRobot dataset. What can be refused without PyTorch is refused
here, at once; the work is done in `training`.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from trace_lab.recipe import parse, recipe
from trace_lab.run import Run
from trace_lab.source import describe


def train(
    dataset: tyro.conf.Positional[Path],
    *,
    out: Path,
    policy: str = "act",
    memory: str | None = None,
    preset: str = "default",
    seed: int = 0,
    steps: int | None = None,
    set_: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    frames: Literal["auto", "gpu", "ram", "file"] = "auto",
    cache: Path | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Trains a policy with a memory (or without one) on a LeRobot dataset, whole episodes at a time.

    Frames are decoded once; whole episodes are encoded once and remembered once, as on the robot, and the policy learns at
    many times of each. Stopped or killed, it goes on from its last checkpoint when called again with the same options.
    Checkpoints are LeRobot's: lerobot-eval --policy.path=OUT/checkpoints/last/pretrained_model. Several GPUs: accelerate
    launch -m trace_lab.cli train ...

    Args:
        dataset: folder of a LeRobot dataset (v3), for instance one of tracemem collect.
        out: folder of the run: run.json, metrics.jsonl, curves.png, checkpoints.
        policy: act or diffusion.
        memory: trace, paper, none, gru, transformer, lru, retrieval, delta, ssm, window, or an ablation (tracemem
            params lists them); the preset's if not said.
        preset: default, paper (LeRobot's and the paper's sizes, the paper's memory) or tiny (for two CPU cores).
        seed: of weights, batches and noise.
        steps: updates; the preset's number if not said.
        set_: any other number of the recipe, for instance lr=3e-4 episodes=4 policy.dim_model=256 memory.period=4;
            docs/training.md lists them.
        device: where to train.
        frames: where decoded pictures are kept; auto is the nearest place that has room (a file where each is needed once:
            frozen encoder and a cache).
        cache: a folder in which decoded pictures stay, for several runs on one dataset; and feature maps, where the encoder
            is frozen, for those with the same encoder.
        json_: print the result as JSON.
    """
    own = {"steps": steps} if steps is not None else {}
    made = recipe(preset, policy, memory, own | parse(set_))
    describe(dataset)
    Run(out).usable()
    from trace_lab.training import run_training  # PyTorch and LeRobot take a while to import

    console = Console(stderr=json_)
    result = run_training(
        dataset, out, made, seed,
        device=device, frames=frames, cache=cache, console=console, notes=task_of(dataset),
    )  # fmt: skip
    if int(os.environ.get("RANK", "0")):  # one of several processes speaks
        return 0
    if json_:
        print(json.dumps(vars(result)))  # noqa: T201
    else:
        console.print(
            f"Wrote {result.checkpoint}: {result.step} updates, loss {result.loss}, {result.seconds:.0f} s, "
            f"{result.targets_per_second:,.0f} targets/s",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return 0


def task_of(dataset: Path) -> dict[str, Any]:
    """The suite's task that a dataset was collected for, so that `tracemem eval RUN` need not be told. Training does not
    look at it.
    """
    note = dataset / "meta" / "trace_bench.json"
    return {"task": json.loads(note.read_text())["task"]} if note.exists() else {}
