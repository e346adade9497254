"""`tracemem gallery`: draws each task of the suite for people: the cue, the shared segment, the branch, the decision."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trace_bench.tasks import load, of_suite

if TYPE_CHECKING:
    from trace_bench.env import BenchEnv

Picture = NDArray[np.uint8]
MOMENTS = ("the cue", "shared segment", "branch: the same for all", "right decision")


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
    task: tuple[str, ...] = of_suite(), out: Path = Path("docs/pictures"), seed: int = 1, size: int = 220
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
