"""Pictures of the suite for people. `tracemem gallery` draws each task: the cue, the shared segment, the branch, the
decision. For each collected dataset there are a video of one episode for each cue and a sheet of the moments that matter;
they are drawn by playing the episode again, and are no part of the dataset.
"""

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trace_bench.tasks import TASKS, load
from trace_lab.dataset import Settings, play

if TYPE_CHECKING:
    from trace_bench.env import BenchEnv

Picture = NDArray[np.uint8]
MOMENTS = ("the cue", "shared segment", "branch: the same for all", "right decision")


# -- of a collected dataset ------------------------------------------------------------------------------------------------


def slug(cue: str) -> str:
    """From "left drawer" to "left_drawer"."""
    return "".join(letter if letter.isalnum() else "_" for letter in cue.lower())


def moments(row: dict[str, Any]) -> list[tuple[str, int]]:
    """What to show of an episode, from its score sheet: a caption and the number of steps taken by then."""
    branch = row["decisions"][0]["frame"]
    shown = [("start", 0), ("cue gone", row["cue_gone"]), ("shared segment", (row["cue_gone"] + branch) // 2)]
    later = [(f"branch {number}", decision["frame"]) for number, decision in enumerate(row["decisions"], start=1)]
    later += [(name.partition(": ")[2], step) for name, step in row["stages"].items() if step > branch]
    shown += sorted(later, key=lambda moment: moment[1])
    return shown if shown[-1][1] == row["steps"] else [*shown, ("end", row["steps"])]


def film(settings: Settings, row: dict[str, Any], path: Path) -> list[Picture]:
    """Plays an episode again into a video; returns the pictures of its moments."""
    import av

    env = settings.env(cameras=())
    wanted, kept = {step for _, step in moments(row)}, {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", env.profile.rate, options={"crf": "20", "preset": "veryfast"})
        stream.thread_count, stream.pix_fmt = 1, "yuv420p"  # what every player plays
        stream.time_base = Fraction(1, env.profile.rate)

        def show(step: int) -> None:
            picture = env.render()
            if step in wanted:
                kept[step] = picture
            stream.height, stream.width = picture.shape[:2]
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = step
            container.mux(stream.encode(frame))

        for step, _ in enumerate(play(env, row["seed"])):
            show(step)
        show(env.record.steps)
        container.mux(stream.encode())
    env.close()
    return [kept[step] for _, step in moments(row)]


def contact_sheet(title: str, rows: list[tuple[str, dict[str, Any], list[Picture]]], path: Path) -> None:
    """One row a cue (its name, the score sheet, the pictures of its moments)."""
    from matplotlib.figure import Figure

    columns = max(len(pictures) for _, _, pictures in rows)
    figure = Figure(figsize=(1.9 * columns, 1.5 * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (cue, row, pictures) in zip(axes, rows, strict=True):
        for panel in line:
            panel.set_axis_off()
        for panel, picture, (caption, step) in zip(line, pictures, moments(row), strict=False):
            panel.imshow(picture, interpolation="nearest")
            panel.set_title(f"{caption} ({step})", fontsize=7)
        line[0].set_title(f"{cue}: start (0)", fontsize=7, fontweight="bold")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


# -- of the suite ----------------------------------------------------------------------------------------------------------


def shown(env: "BenchEnv", seed: int, cue: int, size: int) -> list[Picture]:
    """The overhead picture at each of MOMENTS."""
    from trace_bench.robot import CAMERAS

    def look() -> Picture:
        return env.world.render(CAMERAS[0], size, size)

    env.reset(seed=seed, options={"cue": cue})
    seen, record = [look()], env.record
    for action in env.expert():
        env.step(action)
        shared = record.cue_gone is not None and record.steps == record.cue_gone + env.episode.delay // 2
        if (shared, len(seen)) == (True, 1) or (env.world.lamp, len(seen)) == (1, 2):
            seen.append(look())
        if record.decisions[0].step is not None:
            return [*seen, look()]
    raise AssertionError("unreachable: an expert goes on for ever")


def draw(task: str, seed: int, size: int, path: Path) -> None:
    """One row a cue, one column a moment."""
    from matplotlib.figure import Figure

    from trace_bench.env import make

    env = make(task, split="train", size=size, cameras=())
    cues = env.bench.cues
    figure = Figure(figsize=(2.1 * len(MOMENTS), 2.2 * len(cues)), layout="constrained")
    axes = figure.subplots(len(cues), len(MOMENTS), squeeze=False)
    for row, cue in enumerate(cues):
        for column, picture in enumerate(shown(env, seed, row, size)):
            panel = axes[row, column]
            panel.imshow(picture)
            panel.set_xticks([])
            panel.set_yticks([])
            if row == 0:
                panel.set_title(MOMENTS[column], fontsize=9)
        axes[row, 0].set_ylabel(cue, fontsize=9)
    env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})


def gallery(
    task: tuple[str, ...] = tuple(TASKS), out: Path = Path("docs/pictures"), seed: int = 1, size: int = 220
) -> int:
    """Draws a picture of each task: rows are cues, columns the moments of an expert's episode, seen from above.

    Args:
        task: the tasks to draw.
        out: folder for TASK.png.
        seed: the episode to show; the cues of one picture differ in nothing else.
        size: pixels along a side of each view.
    """
    names = [load(name).name for name in task]
    for name in names:
        path = out / f"{name.lower()}.png"
        draw(name, seed, size, path)
        print(f"Wrote {path}")  # noqa: T201
    return 0
