"""`tracemem train`: a policy, with a memory or without, on a LeRobot dataset. It can be killed at any moment and goes on
where its last checkpoint was, to the same weights (bit for bit on a CPU). Batches are made in `batches`, frames are kept in
`frames`, the folder is `run`'s; checkpoints are those of the LeRobot plug-in.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from lerobot.policies.factory import get_policy_class
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lerobot_policy_trace.backbone import quicken
from lerobot_policy_trace.capturing import GraphedAct, GraphedUnet
from lerobot_policy_trace.paths import DatasetError
from trace_lab.batches import Batches, generator
from trace_lab.features import encode
from trace_lab.frames import FramesError, FrameStore, fingerprint, open_dataset, open_frames
from trace_lab.policy import cameras, configuration, pipelines, take_encoder
from trace_lab.recipe import Recipe, RecipeError, parse, recipe
from trace_lab.run import Run, RunError, listening
from trace_memory.graphs import GraphedScans, compiles
from trace_memory.memory import MemoryInputError

LOG = 20  # updates between two lines of metrics
FUSE = 1_500  # updates from which compiling the memory's write pays
SLOWER = "no C compiler for Triton here: the memory's writes are not compiled, and a scan takes longer"
DIVERGED = "The last checkpoint is from before that. A smaller lr, memory_lr or clip may help"
TOO_LARGE = "Less at once: --set taught=0.1, or truncate=64, or episodes=4, or memory.update_every=4 (docs/training.md)"


class Stopped(Exception):  # noqa: N818
    """Asked to stop; everything is saved."""


@dataclass
class Training:
    """Everything an update touches."""

    made: Recipe
    seed: int
    policy: Any  # the plug-in's policy
    model: Any  # the same, as accelerate wraps it
    optimizer: torch.optim.Optimizer
    batches: Batches
    accelerator: Accelerator
    before: Any
    after: Any
    step: int = 0

    @classmethod
    def begin(
        cls,
        made: Recipe,
        seed: int,
        store: FrameStore,
        accelerator: Accelerator,
        console: Console | None = None,
        encoder: Path | None = None,
        cache: Path | None = None,
    ) -> "Training":
        """At update 0, with the encoder of a trained policy if there is one."""
        device = accelerator.device
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        config = configuration(made, store.meta, device.type)
        torch.manual_seed(seed)
        policy = get_policy_class(config.type)(config, dataset_meta=store.meta).to(device)
        if encoder is not None:
            take_encoder(policy, encoder)
        before, after = pipelines(config, store.meta)
        policy.train()
        features = None
        if made.backbone == "frozen":
            learnt = encoder is not None or config.pretrained_backbone_weights is not None
            console = console or Console(stderr=True)
            features = encode(policy, store, before, made, console, learnt=learnt, cache=cache)
        else:
            for backbone in policy.backbones:
                quicken(backbone)
        optimizer = config.get_optimizer_preset().build(policy.get_optim_params())
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
            group["fused"] = device.type == "cuda" or None
        model, optimizer = accelerator.prepare(policy, optimizer)
        share, shares = accelerator.process_index, accelerator.num_processes
        batches = Batches(store, config, before, made, seed, share, shares)
        batches.features = features
        if policy.recall is not None:
            policy._test_once()  # the statistics, before the first batch
            # Capture and DistributedDataParallel do not go together: several GPUs scan step by step.
            if batches.whole and device.type == "cuda" and not made.truncate and shares == 1:
                fuse = made.steps >= FUSE and compiles()
                if made.steps >= FUSE and not fuse:
                    (console or Console(stderr=True)).print(SLOWER)
                policy.captured = GraphedScans(policy.recall.memory, made.episodes, batches.lengths(), fuse=fuse)
        begun = cls(made, seed, policy, model, optimizer, batches, accelerator, before, after)
        same = features is not None or made.memory == "none"  # the same work in every update
        other = any(getattr(config, name, False) for name in ("gradient_checkpointing", "compile_model"))
        plain = not config.env_state_feature and not made.truncate and not other
        if same and plain and device.type == "cuda" and shares == 1:
            begun.capture()
        return begun

    def capture(self) -> None:
        """Captures the policy's network."""
        policy, readout, act = self.policy, None, self.made.policy == "act"
        try:
            batch, _ = next(self.batches.at(0)) if act else ({}, 1.0)
            with self.accelerator.autocast():
                if act and policy.recall is not None:
                    with torch.no_grad():
                        batch, readout = policy._scan_episodes(batch, {})
                policy.network = GraphedAct(policy, batch, readout) if act else GraphedUnet(policy, self.made.batch)
        except torch.OutOfMemoryError as error:
            raise RunError(f"update 1: {str(error).split('. ')[0]}. {TOO_LARGE}") from error

    def update(self) -> dict[str, Any]:
        """One update. The metrics are tensors where the policy gives tensors: nobody need wait for them."""
        made = self.made
        torch.manual_seed(generator(self.seed, self.step, 2 + self.accelerator.process_index).initial_seed())
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * made.rate(self.step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.accelerator.device)
        named: dict[str, Any] = {}
        for batch, weight in self.batches.at(self.step):
            try:
                with self.accelerator.autocast():
                    loss, logs = self.model(batch)
                self.accelerator.backward(loss * weight)
            except MemoryInputError as error:
                raise RunError(f"update {self.step + 1}: {error}. {DIVERGED}") from error
            except torch.OutOfMemoryError as error:
                raise RunError(f"update {self.step + 1}: {str(error).split('. ')[0]}. {TOO_LARGE}") from error
            total += loss.detach() * weight
            named = logs or {}
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), made.clip)
        self.optimizer.step()
        self.step += 1
        return {"loss": total, "gradient": norm, **named}

    def agree(self, stop: bool) -> bool:  # noqa: FBT001
        """Whether any of the processes has been asked to stop: all must stop after the same update."""
        if self.accelerator.num_processes == 1:
            return stop
        asked = torch.tensor(float(stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum") > 0)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """The plug-in's checkpoint, and what it takes to go on."""
        policy, state = folder / "pretrained_model", folder / "training_state"
        self.policy.save_pretrained(policy)
        self.before.save_pretrained(policy)
        self.after.save_pretrained(policy)
        state.mkdir()
        kept = self.optimizer.state_dict()["state"]
        tensors = {f"{place}.{name}": x.contiguous() for place, each in kept.items() for name, x in each.items()}
        save_file(tensors, state / "optimizer.safetensors", {"step": str(self.step)})

    def read(self, folder: Path) -> None:
        """Goes on from a checkpoint. Batches, rates and noise need none: they follow from seed and update."""
        try:
            self.policy.load_state_dict(load_file(folder / "pretrained_model" / "model.safetensors"))
        except RuntimeError as error:
            raise RunError(f"{folder}: its weights do not fit. {' '.join(str(error).split())[:300]}") from error
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        with safe_open(folder / "training_state" / "optimizer.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118
                place, _, name = key.partition(".")
                x, like = file.get_tensor(key), parameters[int(place)]
                # moments lie in memory as their parameter does
                state.setdefault(int(place), {})[name] = torch.empty_like(like).copy_(x) if x.ndim == like.ndim else x
            self.step = int(file.metadata()["step"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


# -- the loop --------------------------------------------------------------------------------------------------------------


def follow(training: Training, run: Run, console: Console) -> None:
    """Updates until the recipe is done, with checkpoints and metrics on the way."""
    made, main = training.made, training.accelerator.is_main_process
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    begun, first = time.perf_counter(), training.step
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not main) as progress, listening() as asked:
        bar = progress.add_task("training", total=made.steps, completed=training.step, note="")
        while training.step < made.steps:
            metrics = training.update()
            stop = training.agree(asked())
            due = stop or training.step % made.checkpoint == 0 or training.step == made.steps
            if due or training.step % LOG == 0:
                line = {name: round(float(value), 6) for name, value in metrics.items()}
                if not all(map(torch.isfinite, map(torch.tensor, (line["loss"], line["gradient"])))):
                    raise RunError(
                        f"the loss became {line['loss']} at update {training.step} (gradient {line['gradient']}). {DIVERGED}"
                    )
                speed = (training.step - first) * made.batch / (time.perf_counter() - begun)
                if main and training.step % LOG == 0:
                    run.log({"step": training.step, **line})
                progress.update(bar, note=f"loss {line['loss']:.4f}  {speed:,.0f} targets/s")
            progress.update(bar, completed=training.step)
            if main and due:
                run.save(training.step, training.write)
            if stop:
                raise Stopped(training.step)


@dataclass(frozen=True)
class Result:
    """What came of a training."""

    out: str
    step: int
    loss: float | None
    seconds: float
    targets_per_second: float
    checkpoint: str


def task_of(root: Path) -> str | None:
    """The suite's task a dataset was collected for, if it was."""
    note = root / "meta" / "trace_bench.json"
    return json.loads(note.read_text())["task"] if note.exists() else None


def trained(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The last policy of a finished or stopped run, and a note of what it is: what it asked for, and a digest of its
    weights.
    """
    run = Run(folder)
    if not (folder / "run.json").exists() or not (done := run.finished()):
        raise RunError(f"encoder: {folder}: no run with a checkpoint there, expected a folder of tracemem train")
    asked = json.loads((folder / "run.json").read_text())["asked"]
    policy = run.whole(done[-1]) / "pretrained_model"
    digest = hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest()
    told = {name: asked[name] for name in ("recipe", "seed", "dataset", "encoder") if name in asked}
    return policy, {"asked": told, "step": done[-1], "weights": digest}


def resolved(policy: Any) -> dict[str, Any]:
    """Every number of a policy's memory, whoever chose it."""
    options = policy.config.memory
    return options.config(policy.config.robot_state_feature.shape[0]).to_dict() if policy.recall is not None else {}


def run_training(
    dataset: Path,
    out: Path,
    made: Recipe,
    seed: int,
    *,
    device: str = "auto",
    frames: str = "auto",
    cache: Path | None = None,
    console: Console | None = None,
    encoder: Path | None = None,
) -> Result:
    """Trains, or goes on training, in a folder; `encoder` is the run whose encoder it begins with."""
    console = console or Console(stderr=True)
    meta = open_dataset(dataset)
    configuration(made, meta, "cpu")  # what makes no sense is refused before anything is written
    asked: dict[str, Any] = {"recipe": made.to_dict(), "seed": seed, "task": task_of(dataset)}
    asked |= {"dataset": fingerprint(dataset)}
    if encoder is not None:
        encoder, asked["encoder"] = trained(encoder)
    precision = {"auto": "bf16" if device != "cpu" and torch.cuda.is_available() else "no", "float32": "no"}
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=precision.get(made.precision, made.precision),
        kwargs_handlers=[unused],
        step_scheduler_with_optimizer=False,
    )
    if device == "cuda" and accelerator.device.type != "cuda":
        raise RunError("device: got 'cuda', but PyTorch finds no GPU")
    run, main = Run(out), accelerator.is_main_process
    run.check(asked)
    with run.locked() if main else contextlib.nullcontext():
        if main:
            run.mend(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
        once = made.backbone == "frozen" and cache is not None  # then a picture is encoded at most once
        place = "file" if once and frames == "auto" else frames
        store = open_frames(
            meta, accelerator.device, cameras=cameras(made, meta), place=place, cache=cache, console=console
        )
        training = Training.begin(made, seed, store, accelerator, console, encoder, cache)
        if main:
            run.begin(asked, memory=resolved(training.policy))
        accelerator.wait_for_everyone()
        if done := run.finished():
            training.read(run.checkpoint(done[-1]))
        accelerator.wait_for_everyone()
        if main:
            run.forget_after(training.step)
        begun, first = time.perf_counter(), training.step
        try:
            follow(training, run, console)
        finally:
            if main:
                with contextlib.suppress(OSError):  # a full disk is told of by what filled it
                    run.draw()
        seconds = time.perf_counter() - begun
        lines = run.lines()
        return Result(
            str(out),
            training.step,
            lines[-1]["loss"] if lines else None,
            round(seconds, 1),
            round((training.step - first) * made.batch / max(seconds, 1e-9), 1),
            str(run.checkpoints / "last" / "pretrained_model"),
        )


def train(
    dataset: tyro.conf.Positional[Path],
    *,
    out: Path,
    policy: str = "act",
    memory: str = "trace",
    preset: str = "default",
    seed: int = 0,
    steps: int | None = None,
    set_: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = (),
    encoder: Path | None = None,
    device: str = "auto",
    frames: str = "auto",
    cache: Path | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Trains a policy with a memory (or any rival, or none) on a LeRobot dataset, whole episodes at a time.

    Frames are decoded once; whole episodes are encoded once and remembered once, as on the robot, and the policy learns at
    many times of each. Stopped or killed, it goes on from its last checkpoint when called again with the same options.
    Checkpoints are LeRobot's: lerobot-eval --policy.path=OUT/checkpoints/last/pretrained_model. Several GPUs: accelerate
    launch -m trace_lab.cli train ...

    Args:
        dataset: folder of a LeRobot dataset (v3), for instance one of tracemem collect.
        out: folder of the run: run.json, metrics.jsonl, curves.png, checkpoints.
        policy: act or diffusion.
        memory: trace, none, gru, transformer, lru, retrieval, or an ablation (tracemem params lists them).
        preset: default, paper (LeRobot's and the paper's sizes) or tiny (for two CPU cores).
        seed: of weights, batches and noise.
        steps: updates; the preset's number if not said.
        set_: any other number of the recipe, for instance lr=3e-4 episodes=4 scan=budget policy.dim_model=256
            memory.slots=6; recipe.py lists them.
        encoder: a run of tracemem train, on any data: this one begins with its encoder (backbone=frozen leaves it as it
            is), and with nothing else of it.
        device: auto, cpu or cuda.
        frames: where decoded pictures are kept: gpu, ram, file, or auto, the nearest that has room (a file where each is
            needed once: frozen encoder and a cache).
        cache: a folder in which decoded pictures stay, for several runs on one dataset; and feature maps, where the encoder
            is frozen, for those with the same encoder.
        json_: print the result as JSON.
    """
    console = Console(stderr=json_)
    own = {"steps": steps} if steps is not None else {}
    try:
        made = recipe(preset, policy, memory, own | parse(set_))
        result = run_training(
            dataset, out, made, seed, device=device, frames=frames, cache=cache, console=console, encoder=encoder
        )
    except (RecipeError, FramesError, DatasetError, RunError) as error:
        print(f"tracemem train: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, RecipeError) else 1
    except (Stopped, KeyboardInterrupt) as error:
        saved = (
            f"saved after update {error}" if isinstance(error, Stopped) else "not saved; checkpoints from before stay"
        )
        print(f"tracemem train: stopped, {saved}. The same command goes on", file=sys.stderr)  # noqa: T201
        return 130
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
