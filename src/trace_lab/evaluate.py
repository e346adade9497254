"""`tracemem eval`: lets a trained policy do held-out episodes of a task, many at once, and writes one json line an episode
as it ends. It can be stopped at any moment and goes on where it was when called again; `rollout` does the playing.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trace_bench.env import OptionError, make
from trace_bench.referee import Outcome
from trace_bench.registry import VERSIONS, UnknownTaskError, load
from trace_bench.robot import CAMERAS, CHANNELS
from trace_errors import CheckpointError
from trace_lab.collect import UsageError, disk_full, tell
from trace_lab.dataset import FolderError, write_json
from trace_lab.rollout import Begin, Meter, Pilot, PolicyError, Rows, WorkerError, play

FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")
SETTINGS, RESULTS = "evaluation.json", "evaluation.jsonl"
ENV = ("split", "profile", "delay", "limit", "size", "cameras")
OPTIONS = ("split", "profile", "delay", "limit", "cue", "actions", "rest", "draws", "first_seed", "episodes")
Fields = dict[str, Any]  # of json


def find(path: Path) -> tuple[Path, Path | None]:
    """The folder of a policy, and its run if it is in one. The path may be either, or a checkpoint in between."""
    places = [path, path / "pretrained_model", path / "checkpoints" / "last" / "pretrained_model"]
    folder = next((place.resolve() for place in places if (place / FILES[0]).exists()), None)
    if folder is None:
        raise UsageError(f"{path}: no policy there; looked for {', '.join(str(place / FILES[0]) for place in places)}")
    if absent := [name for name in FILES if not (folder / name).exists()]:
        raise UsageError(f"{folder}: {', '.join(absent)} missing, expected what save_pretrained writes")
    if (folder / "run.json").exists():  # packed, with what it was asked to do beside it
        return folder, folder
    return folder, folder.parent.parent.parent if folder.parent.parent.name == "checkpoints" else None


def configuration(folder: Path, device: str) -> Any:
    """The policy's configuration, on a device."""
    import torch

    import lerobot_policy_trace  # noqa: F401  (registers the configurations)
    from lerobot_policy_trace.loading import load_configuration

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: got cuda, but PyTorch finds none here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_configuration(folder, cli_overrides=[f"--device={device}"])
    config.pretrained_backbone_weights = None  # they come from the checkpoint, not from the network
    return config


def eyes(config: Any, size: int | None) -> tuple[int, tuple[str, ...]]:
    """Size of the pictures and cameras that the policy needs; a UsageError if it needs what the suite does not have."""
    shapes = {key.removeprefix("observation.images."): tuple(x.shape) for key, x in config.image_features.items()}
    own = next(iter(shapes.values()))[-1] if shapes else size or 96
    if size not in (None, own):
        raise UsageError(f"--size: got {size}, but the policy's pictures are {own} x {own}")
    needs = {key: tuple(x.shape) for key, x in {**config.input_features, **config.output_features}.items()}
    needs = shapes | {key: shape for key, shape in needs.items() if key not in config.image_features}
    has = dict.fromkeys(CAMERAS, (3, own, own)) | dict.fromkeys(("observation.state", "action"), (len(CHANNELS),))
    if wrong := {key: shape for key, shape in needs.items() if has.get(key) != shape}:
        raise UsageError(f"the policy needs {wrong}; the suite has {has}")
    return own, tuple(camera for camera in CAMERAS if camera in shapes)


def pilot(folder: Path, config: Any, seed: int) -> Pilot:
    """The policy itself, ready to act in float32. Its noise, if it has any, comes from the seed."""
    import torch
    from lerobot.policies.factory import get_policy_class
    from safetensors import SafetensorError

    from lerobot_policy_trace.loading import load_processors

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = {"device_processor": {"device": config.device}}
    with contextlib.redirect_stdout(StringIO()):  # LeRobot prints, and --json must be only that
        try:
            policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        except RuntimeError as error:
            raise UsageError(f"{folder}: its weights do not fit. {' '.join(str(error).split())[:300]}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{folder / FILES[1]}: not a whole safetensors file ({error})") from error
        pipelines = load_processors(config, folder, preprocessor_overrides=device)
    torch.manual_seed(seed)
    return Pilot(policy, *pipelines)


def pace(config: Any, actions: int | None, rest: int | None, draws: int | None) -> None:
    """Lets a policy look after so many actions, after so many while it rests, and draw them in so many steps, in place of
    its own numbers.
    """
    diffusion = config.type.endswith("diffusion")
    if actions is not None:
        most = config.horizon - config.n_obs_steps + 1 if diffusion else config.chunk_size
        if not diffusion and config.temporal_ensemble_coeff is not None:
            most = 1  # it looks at every step
        if not 1 <= actions <= most:
            raise UsageError(f"--actions: got {actions}, expected 1 to {most}, which is as far as the policy can go")
        config.n_action_steps = actions
    if rest is not None:
        if not config.type.startswith("trace_"):
            raise UsageError(f"--rest: got {rest}, expected none: a stock policy looks as often at rest as ever")
        config.rest_action_steps = rest
    if config.type.startswith("trace_"):
        from lerobot_policy_trace.configuration_trace import check_rest

        try:
            check_rest(config)
        except ValueError as error:
            raise UsageError(f"--actions, --rest: {error}") from error
    if draws is not None:
        if not diffusion:
            raise UsageError(f"--draws: got {draws}, expected none: only Diffusion Policy draws actions")
        if not 1 <= draws <= config.num_train_timesteps:
            raise UsageError(f"--draws: got {draws}, expected 1 to {config.num_train_timesteps}")
        config.num_inference_steps = draws


def settle(folder: Path, config: Any, task: str, seed: int | None, size: int | None, **options: Any) -> Fields:
    """All that decides the results, written out: delay and limit are the environment's own if not said."""
    own, cameras = eyes(config, size)
    env = make(task, **{name: options.get(name) for name in ENV} | {"size": own, "cameras": ()})
    step, rest = folder.parent.name, [folder / FILES[0], *sorted(folder.glob("policy_*"))]
    return {
        "checkpoint": str(folder),
        "sha256": hashlib.sha256((folder / FILES[1]).read_bytes()).hexdigest(),  # of the weights
        "sha256_config": hashlib.sha256(b"".join(path.read_bytes() for path in rest)).hexdigest(),
        "checkpoint_step": int(step) if step.isdigit() else None,
        "policy": config.type.removeprefix("trace_"),
        "memory": config.memory.name if hasattr(config, "memory") else "none",
        "training_seed": seed or 0,
        "training_seed_known": seed is not None,  # if not, 0 stands for it
        "task": task,
        **options | {"delay": env.delay, "limit": env.limit, "size": own, "cameras": list(cameras)},
        "suite": VERSIONS[task],
    }


def looks(step: int, acts: int, back: int, writes: int) -> bool:
    """Whether a policy looks at the picture of a step: before each chunk of so many actions, at so many pictures before that
    one, and where it writes to its memory (0: never).
    """
    return -step % acts <= back or (writes > 0 and step % writes == 0)


def looking(config: Any) -> Callable[[int], bool] | None:
    """At which pictures a policy looks; None: an ensemble over time, the stock policies, and who looks more often at rest
    may look at any.
    """
    if not config.type.startswith("trace_") or config.rest_action_steps is not None:
        return None
    if getattr(config, "temporal_ensemble_coeff", None) is not None:
        return None
    writes = 0 if config.memory.name == "none" else config.memory.update_every
    return partial(looks, acts=config.n_action_steps, back=config.n_obs_steps - 1, writes=writes)


def check(out: Path, settings: Fields) -> Fields:
    """What the folder's settings file holds, {} if there is none; a FolderError if other settings made it."""
    if out.is_file():
        raise FolderError(f"{out} is a file, expected a folder")
    content: Fields = json.loads((out / SETTINGS).read_text()) if (out / SETTINGS).exists() else {}
    if not content and lines(out):
        raise FolderError(f"{out} has {RESULTS} but no {SETTINGS}: choose another folder with --out")
    found = content.get("settings", settings)
    other = {name: found.get(name) for name in settings if name != "episodes" and found.get(name) != settings[name]}
    if set(other) - {"checkpoint"}:  # the same weights may have moved
        differences = "; ".join(f"{x}: found {old!r}, asked for {settings[x]!r}" for x, old in other.items())
        raise FolderError(f"{out} was made with other settings: {differences}. Choose another folder with --out")
    return content


def lines(out: Path) -> dict[int, Fields]:
    """The finished episodes of a folder, by seed. A line that was torn off at the end does not count."""
    path = out / RESULTS
    try:
        rows = [json.loads(text) for text in path.read_text().split("\n")[:-1]] if path.exists() else []
        return {row["seed"]: row for row in rows}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FolderError(f"{path}: a line in it is not the result of an episode ({error!r})") from error


@contextlib.contextmanager
def opened(out: Path) -> Iterator[TextIO]:
    """The results, for one process at a time to add to. A torn end is cut off."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / RESULTS).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"{out}: another tracemem eval is at work there") from error
        file.seek(0)
        file.truncate(file.read().rfind("\n") + 1)  # json is ASCII: as many bytes as characters
        yield file


def missing(out: Path, settings: Fields, videos: int) -> list[Begin]:
    """Episodes without a line, or without a film where one is wanted: that one is played again, for the film only."""
    done, found, first = lines(out), [], settings["first_seed"]
    for seed in range(first, first + settings["episodes"]):
        stem = out / "videos" / f"{settings['task']}-{seed}"
        film = stem if seed < first + videos and not [*stem.parent.glob(f"{stem.name}-*.mp4")] else None
        if film or seed not in done:
            found.append(Begin(seed, film, settings["cue"]))
    return found


def summary(rows: Collection[Fields]) -> Fields:
    """Of finished episodes. Branch accuracy is the share of the decisions taken that were right."""
    decided = [decision["correct"] for row in rows for decision in row["decisions"] if decision["choice"] is not None]
    outcomes = [row["outcome"] for row in rows]
    return {
        "episodes": len(rows),
        "mean_progress": sum(row["progress"] for row in rows) / len(rows),
        "branch_accuracy": sum(decided) / len(decided) if decided else None,
        "decisions": len(decided),
        "outcomes": {str(kind): outcomes.count(kind) for kind in Outcome if kind in outcomes},
    }


def go(settings: Fields, out: Path, file: TextIO, rows: Rows, crew: Pilot, todo: list[Begin], bars: Console) -> Fields:
    """Plays episodes, adds a line for each that has none, and returns the summary; its speeds are of this call."""
    names = ("policy", "memory", "training_seed", "checkpoint_step")
    whose = {name: settings[name] for name in names if settings[name] is not None}
    done, meter, started = lines(out), Meter(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    with Progress(*columns, TimeRemainingColumn(), console=bars) as progress:
        bar = progress.add_task(f"{settings['task']}: episodes", total=len(todo), news="")
        for sheets in play(rows, crew, todo, meter):
            for sheet in (sheet for sheet in sheets if sheet["seed"] not in done):
                done[sheet["seed"]] = sheet | whose
                file.write(json.dumps(sheet | whose) + "\n")
                file.flush()
            seconds = time.perf_counter() - started
            mean = f", mean progress {summary(done.values())['mean_progress']:.0%}" if done else ""
            progress.update(bar, advance=len(sheets), news=f"{meter.steps / seconds:.0f} steps/s{mean}")
    speed = {"env_steps_per_second": meter.steps / seconds, "policy_ms_per_step": 1e3 * meter.thinking / meter.calls}
    return summary(done.values()) | {"seconds": seconds, "env_steps": meter.steps} | speed


def show(console: Console, path: Path, settings: Fields, found: Fields) -> None:
    """The results as a table."""
    right = f"{found['branch_accuracy']:.0%} of {found['decisions']}" if found["decisions"] else "none taken"
    outcomes = "\n".join(f"{count} {kind}" for kind, count in found["outcomes"].items())
    title = f"{settings['task']}: {settings['policy']}, memory {settings['memory']}"
    table = Table("episodes", "mean progress", "right decisions", "outcomes", title=title)
    table.add_row(str(found["episodes"]), f"{found['mean_progress']:.1%}", right, outcomes)
    console.print(table)
    tell(console, f"Wrote {path}")


def say(text: object, code: int) -> int:
    """An error, to the terminal."""
    print(f"tracemem eval: {text}", file=sys.stderr)  # noqa: T201
    return code


def evaluate(
    checkpoint: tyro.conf.Positional[Path],
    *,
    task: str | None = None,
    episodes: int = 25,
    first_seed: int = 0,
    split: Literal["heldout", "train"] = "heldout",
    size: int | None = None,
    profile: Literal["default", "paper"] = "default",
    delay: int | None = None,
    limit: int | None = None,
    cue: int | None = None,
    actions: int | None = None,
    rest: int | None = None,
    draws: int | None = None,
    rows: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    videos: int = 0,
    out: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Lets a trained policy do a task of the suite and writes how far it came in each episode.

    Every method gets the same episodes: those of the seeds from --first-seed on. Stopped or killed, it goes on where it was
    when called again with the same options; asked for more episodes, it adds them.

    Args:
        checkpoint: a pretrained_model folder, a checkpoint that holds one, or a run (its last checkpoint).
        task: Tool, Book, Laundry, Cable or Medicine; what the run was trained on if not said.
        episodes: how many.
        first_seed: seed of the first episode; the next ones count up from it.
        split: which scenes: heldout or train.
        size: width and height of the pictures, pixels; the policy's.
        profile: default is 10 control steps a second; paper has the paper's rate and horizons.
        delay: least number of control steps between cue and branch; the profile's if not said.
        limit: control steps after which an episode is stopped; the task's own if not said.
        cue: every episode has this one, counted from 0, in place of its seed's. With each of them in turn (and a folder for
            each, --out) it shows whether the choice in a scene changes with the cue at all.
        actions: how many the policy does from one look to the next; its own number (n_action_steps) if not said.
        rest: how many while it rests, that is where these would not move it; its own number (rest_action_steps; none, unless
            chosen) if not said.
        draws: steps in which Diffusion Policy draws its actions; its own number (num_inference_steps) if not said.
        rows: episodes played at once; auto is up to 32.
        workers: processes that simulate; auto is one for each core.
        videos: how many episodes to film, from the first on.
        out: the folder to write; evaluation/TASK in the run if not said.
        device: where the policy runs.
        json_: print the results as JSON instead of a table.
    """
    asked, console, place = dict(locals()), Console(stderr=json_), out
    try:
        for name, least in (("episodes", 1), ("first_seed", 0), ("rows", 1), ("workers", 1), ("videos", 0)):
            if asked[name] != "auto" and asked[name] < least:
                raise UsageError(f"--{name.replace('_', '-')}: got {asked[name]}, expected {least} or more")
        folder, run = find(checkpoint)
        notes = json.loads((run / "run.json").read_text()) if run and (run / "run.json").exists() else {}
        if not (task := task or notes.get("task")):
            raise UsageError(f"--task: say which one, because {checkpoint} is in no run whose run.json tells its task")
        name, cues = load(task).name, load(task).cues
        if cue is not None and not 0 <= cue < len(cues):
            raise UsageError(f"--cue: got {cue}, expected 0 to {len(cues) - 1} ({', '.join(cues)})")
        if out is None and run is None:
            raise UsageError(f"--out: say where to write, because {checkpoint} is in no run")
        place = out or Path(run or "", "evaluation", name)
        config = configuration(folder, device)
        pace(config, actions, rest, draws)
        options = {each: asked[each] for each in OPTIONS}
        settings = settle(folder, config, name, notes.get("seed"), size, **options)
        check(place, settings)
        with opened(place) as file:
            content, todo = check(place, settings), missing(place, settings, videos)
            settings["episodes"] = max(episodes, content.get("settings", settings)["episodes"])
            if todo:
                write_json(place / SETTINGS, {"settings": settings})
                count = min(32 if rows == "auto" else rows, len(todo))
                processes = min(len(os.sched_getaffinity(0)) if workers == "auto" else workers, count)
                build = partial(make, name, looks=looking(config), **{x: settings[x] for x in ENV})
                with Rows(build, count, processes) as envs:
                    crew = pilot(folder, config, first_seed)
                    content["summary"] = go(settings, place, file, envs, crew, todo, console)
            found = content.get("summary") or summary(lines(place).values())
            write_json(place / SETTINGS, {"settings": settings, "summary": found})
    except CheckpointError as error:
        return say(error, error.exit_code)
    except (UsageError, UnknownTaskError, OptionError, FolderError, PolicyError) as error:
        return say(error, 1 if isinstance(error, FolderError | PolicyError) else 2)
    except (KeyboardInterrupt, WorkerError, OSError) as error:
        if isinstance(error, OSError) and not disk_full(error):
            raise
        what, code = ("stopped", 130) if isinstance(error, KeyboardInterrupt) else (error, 1)
        again = f"Finished episodes: {len(lines(place)) if place else 0}. To go on, call it again with the same options"
        return say(f"{what}. {again}", code)
    if json_:
        print(json.dumps({"out": str(place), "settings": settings, "summary": found}))  # noqa: T201
    else:
        show(console, place / RESULTS, settings, found)
    return 0
