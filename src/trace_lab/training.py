"""Training: one update after the other, with checkpoints. It can be killed at any moment and goes on where its last
checkpoint was, to the same weights (bit for bit on a CPU). Batches are made in `sampling`, frames are kept in `frames`, the
folder is `run`'s; checkpoints are those of the LeRobot plug-in.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from lerobot.policies.factory import get_policy_class
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lerobot_policy_trace import EpisodeBatch
from lerobot_policy_trace.encoder import to_channels_last
from trace_errors import ObservationError, RunError
from trace_lab.features import encode
from trace_lab.frames import FrameStore, open_dataset, open_frames
from trace_lab.policy import cameras, configuration, pipelines
from trace_lab.progress import progress
from trace_lab.recipe import Recipe
from trace_lab.run import Run, listening
from trace_lab.sampling import Batches, generator
from trace_lab.source import fingerprint

LOG = 20  # updates between two lines of metrics
DIVERGED = "The last checkpoint is from before that. A smaller lr, memory_lr or clip may help"
TOO_LARGE = "Less at once: --set episodes=4, or memory.period=4 (docs/training.md)"


class Stopped(KeyboardInterrupt):
    """Asked to stop; everything is saved. The message says so."""


@dataclass
class Training:
    """Everything an update touches."""

    made: Recipe
    seed: int
    policy: Any  # the plug-in's policy
    model: Any  # the same, as accelerate wraps it for several processes
    optimizer: torch.optim.Optimizer
    batches: Batches
    accelerator: Accelerator
    before: Any  # its preprocessor
    after: Any  # and postprocessor
    programs: Any = None  # of the policy, captured on a GPU
    step: int = 0

    @classmethod
    def begin(
        cls,
        made: Recipe,
        seed: int,
        store: FrameStore,
        accelerator: Accelerator,
        console: Console | None = None,
        cache: Path | None = None,
    ) -> "Training":
        """At update 0.

        Args:
            made: the recipe.
            seed: of weights, batches and noise.
            store: the frames to learn from.
            accelerator: the device, and the other processes.
            console: where progress is shown.
            cache: a folder for feature maps, where the encoder is frozen.
        """
        device, console = accelerator.device, console or Console(stderr=True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        config = configuration(made, store.meta, device.type)
        torch.manual_seed(seed)
        policy = get_policy_class(config.type)(config, dataset_meta=store.meta).to(device)
        before, after = pipelines(config, store.meta)
        policy.train()
        maps = None
        if made.backbone == "frozen":
            maps = encode(policy, store, before, made, console, cache=cache)
        else:
            for backbone in policy.backbones:
                to_channels_last(backbone)
        policy.prepare()  # the memory's statistics
        optimizer = config.get_optimizer_preset().build(policy.get_optim_params())
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
            group["fused"] = device.type == "cuda" or None
        model, optimizer = accelerator.prepare(policy, optimizer)
        share, shares = accelerator.process_index, accelerator.num_processes
        batches = Batches(store, config, before, made, seed, share=share, shares=shares, maps=maps)
        begun = cls(made, seed, policy, model, optimizer, batches, accelerator, before, after)
        begun.programs = programs_for(begun)
        return begun

    @property
    def autocast(self) -> AbstractContextManager[Any]:
        """The number format of a forward pass."""
        device = self.accelerator.device.type
        half = self.made.precision == "bf16" or (self.made.precision == "auto" and device == "cuda")
        return torch.autocast(device, torch.bfloat16, enabled=half)

    def update(self) -> dict[str, Any]:
        """One update. The metrics are tensors where the policy gives tensors: nobody need wait for them."""
        torch.manual_seed(generator(self.seed, self.step, 2 + self.accelerator.process_index).initial_seed())
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * self.made.rate(self.step)
        self.optimizer.zero_grad()
        batch = self.batches.at(self.step)
        with naming(self.step + 1):
            with self.autocast:
                loss, logs = self.model(batch) if self.programs is None else self.model(batch, programs=self.programs)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.made.clip)
        self.optimizer.step()
        self.step += 1
        return {"loss": loss.detach(), "gradient": norm, **(logs or {})}

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


@contextmanager
def naming(update: int) -> Iterator[None]:
    """What can go wrong in a forward or backward pass, said with the update it went wrong in and what to do."""
    try:
        yield
    except ObservationError as error:
        raise RunError(f"update {update}: {error}. {DIVERGED}") from error
    except torch.OutOfMemoryError as error:
        raise RunError(f"update {update}: {str(error).split('. ')[0]}. {TOO_LARGE}") from error


def programs_for(training: Training) -> Any:
    """The policy's CUDA programs for batches like the first; None on a CPU, with several GPUs, where capture and
    DistributedDataParallel do not go together, and for LeRobot's own batches.
    """
    made, config, batches = training.made, training.policy.config, training.batches
    if training.accelerator.device.type != "cuda" or training.accelerator.num_processes > 1:
        return None
    from lerobot_policy_trace.capture import captured

    batch = batches.at(0)
    if not isinstance(batch, EpisodeBatch):
        return None
    same = made.backbone == "frozen" or made.memory == "none"  # the same work in every update
    other = any(getattr(config, name, False) for name in ("gradient_checkpointing", "compile_model"))
    with naming(1), training.autocast:
        return captured(training.policy, batch, batches.lengths(), network=same and not other)


# -- the loop --------------------------------------------------------------------------------------------------------------


def follow(training: Training, run: Run, console: Console) -> None:
    """Updates until the recipe is done, with checkpoints and metrics on the way."""
    made, main = training.made, training.accelerator.is_main_process
    begun, first, loss = time.perf_counter(), training.step, ""
    shown = console if main else Console(quiet=True)
    with progress("training", made.steps, done=first, console=shown, keep=True) as bar, listening() as asked:
        while training.step < made.steps:
            metrics = training.update()
            stop, last = training.agree(asked()), training.step == made.steps
            log = last or training.step % LOG == 0
            due = stop or last or training.step % made.checkpoint == 0
            if log or due or training.step == first + 1:
                line = {name: round(float(value), 6) for name, value in metrics.items()}
                if not all(map(torch.isfinite, map(torch.tensor, (line["loss"], line["gradient"])))):
                    raise RunError(
                        f"the loss became {line['loss']} at update {training.step} (gradient {line['gradient']}). {DIVERGED}"
                    )
                if main and log:
                    run.log({"step": training.step, **line})
                loss = f"loss {line['loss']:.4f}"
            speed = (training.step - first) * made.batch / (time.perf_counter() - begun)
            bar.update(training.step, f"{loss}, {speed:,.0f} targets/s")
            if main and due:
                run.save(training.step, training.write)
            if stop:
                raise Stopped(f"stopped, saved after update {training.step}. The same command goes on")


@dataclass
class Result:
    """What came of a training."""

    out: str
    step: int
    loss: float | None  # None only of a run that was stopped before its first line of metrics, and finished elsewhere
    seconds: float
    targets_per_second: float
    checkpoint: str


def resolved(policy: Any) -> dict[str, Any]:
    """Every number of a policy's memory, whoever chose it."""
    if policy.memory_head is None:
        return {}
    return dict(policy.config.memory.config(policy.config.robot_state_feature.shape[0]).to_dict())


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
    notes: dict[str, Any] | None = None,
) -> Result:
    """Trains, or goes on training, in a folder.

    Args:
        dataset: folder of a LeRobot dataset.
        out: folder of the run.
        made: the recipe.
        seed: of weights, batches and noise.
        device: auto, cpu or cuda.
        frames: where decoded pictures are kept: gpu, ram, file or auto.
        cache: a folder in which decoded pictures and feature maps stay.
        console: where progress is shown.
        notes: what else `run.json` shall say.

    Raises:
        UsageError, DatasetError, RunError: it cannot begin or go on; what the folder has stays as it is.
        Stopped: somebody asked to stop; everything is saved.
    """
    console = console or Console(stderr=True)
    run = Run(out)
    meta = open_dataset(dataset)
    configuration(made, meta, "cpu")  # what makes no sense is refused before anything is written
    asked: dict[str, Any] = {"recipe": made.to_dict(), "seed": seed, "dataset": fingerprint(dataset)}
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[unused], step_scheduler_with_optimizer=False
    )
    if device == "cuda" and accelerator.device.type != "cuda":
        raise RunError("device: got 'cuda', but PyTorch finds no GPU")
    run.check(asked)
    main = accelerator.is_main_process
    with run.locked() if main else nullcontext():
        if main:
            run.mend(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
        once = made.backbone == "frozen" and cache is not None  # then a picture is encoded at most once
        place = "file" if once and frames == "auto" else frames
        store = open_frames(
            meta, accelerator.device, cameras=cameras(made, meta), place=place, cache=cache, console=console
        )
        training = Training.begin(made, seed, store, accelerator, console, cache)
        if main:
            run.begin(asked, seed=seed, memory=resolved(training.policy), **(notes or {}))
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
                with suppress(OSError):  # a full disk is told of by what filled it
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
