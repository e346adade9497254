"""Pictures of collected episodes for people: a video of one episode for each cue, and a contact sheet of the moments that
matter. They are drawn by playing the episode again, and are no part of the dataset.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_lab.dataset import Settings, play

Picture = NDArray[np.uint8]


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(len(pictures) for _, _, pictures in rows)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.9 * columns, 1.5 * len(rows) + 0.3), squeeze=False, layout="constrained"
    )
    for line, (cue, row, pictures) in zip(axes, rows, strict=True):
        for panel in line:
            panel.set_axis_off()
        for panel, picture, (caption, step) in zip(line, pictures, moments(row), strict=False):
            panel.imshow(picture, interpolation="nearest")
            panel.set_title(f"{caption} ({step})", fontsize=7)
        line[0].set_title(f"{cue}: start (0)", fontsize=7, fontweight="bold")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
