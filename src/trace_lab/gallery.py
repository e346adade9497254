"""`tracemem gallery`: one picture for each task of the suite: the cue, the shared segment, the branch, the decision."""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from trace_bench.env import BenchEnv, make
from trace_bench.registry import TASKS, UnknownTaskError, load
from trace_bench.robot import CAMERAS

Picture = NDArray[np.uint8]
MOMENTS = ("the cue", "shared segment", "branch: the same for all", "right decision")


def moments(env: BenchEnv, seed: int, cue: int, size: int) -> list[Picture]:
    """The overhead picture at each of MOMENTS."""

    def look() -> Picture:
        return env.world.render(CAMERAS[0], size, size)

    env.reset(seed=seed, options={"cue": cue})
    shown, record = [look()], env.record
    for action in env.expert():
        env.step(action)
        shared = record.cue_gone is not None and record.steps == record.cue_gone + env.episode.delay // 2
        if (shared, len(shown)) == (True, 1) or (env.world.lamp, len(shown)) == (1, 2):
            shown.append(look())
        if record.decisions[0].step is not None:
            return [*shown, look()]
    raise AssertionError("unreachable: an expert goes on for ever")


def draw(task: str, seed: int, size: int, path: Path) -> None:
    """One row a cue, one column a moment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    env = make(task, split="train", cameras=())
    cues = env.bench.cues
    figure, axes = plt.subplots(
        len(cues), len(MOMENTS), figsize=(2.1 * len(MOMENTS), 2.2 * len(cues)), squeeze=False, layout="constrained"
    )
    for row, cue in enumerate(cues):
        for column, picture in enumerate(moments(env, seed, row, size)):
            panel = axes[row, column]
            panel.imshow(picture)
            panel.set_xticks([])
            panel.set_yticks([])
            if row == 0:
                panel.set_title(MOMENTS[column], fontsize=9)
        axes[row, 0].set_ylabel(cue, fontsize=9)
    env.close()
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    plt.close(figure)


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
    console = Console()
    try:
        names = [load(name).name for name in task]
    except UnknownTaskError as error:
        print(f"tracemem gallery: {error}", file=sys.stderr)  # noqa: T201
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = out / f"{name.lower()}.png"
        draw(name, seed, size, path)
        console.print(f"Wrote {path}")
    return 0
