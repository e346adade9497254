"""Moving pictures. `Film` writes the video of an episode. Of a collected dataset there are one for each cue and a sheet of
the moments that matter, drawn by playing the episode again; they are no part of the dataset. Of held-out episodes there is
what came of each, in words, and one moving picture of an episode with several policies in step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from trace_bench.tasks import load
from trace_lab.dataset import Settings, play
from trace_lab.results import lines

Picture = NDArray[np.uint8]
LARGEST = 2_000_000  # bytes of a moving picture
TRIES = ((288, 60), (240, 45), (192, 30), (144, 20))  # width of a panel and quality: the first that is small enough
BAR, HELD = 22, 1.5  # pixels of a line of words; seconds for which the end is shown


def slug(cue: str) -> str:
    """From "left drawer" to "left_drawer"."""
    return "".join(letter if letter.isalnum() else "_" for letter in cue.lower())


class Film:
    """A video that grows with its episode. It has its name only when it is finished."""

    def __init__(self, path: Path, rate: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.temporary, self.frames = path, path.with_name(f"{path.name}.tmp"), 0
        self.container = av.open(str(self.temporary), "w", format="mp4")
        self.stream: Any = self.container.add_stream("h264", rate, options={"crf": "20", "preset": "veryfast"})
        self.stream.thread_count, self.stream.pix_fmt = 1, "yuv420p"  # what every player plays
        self.stream.time_base = Fraction(1, rate)

    def add(self, picture: NDArray[np.uint8]) -> None:
        """The next frame."""
        self.stream.height, self.stream.width = picture.shape[:2]
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts, self.frames = self.frames, self.frames + 1
        self.container.mux(self.stream.encode(frame))

    def finish(self, outcome: str = "") -> None:
        """The episode is over. Its outcome, if there is one to tell, ends the name."""
        self.container.mux(self.stream.encode())
        self.container.close()
        ending = f"-{slug(outcome)}" if outcome else ""
        self.temporary.rename(self.path.with_name(f"{self.path.name}{ending}.mp4"))


# -- of a collected dataset ------------------------------------------------------------------------------------------------


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
    env = settings.env(cameras=())
    wanted, kept, video = {step for _, step in moments(row)}, {}, Film(path, env.profile.rate)

    def show(step: int) -> None:
        picture = env.render()
        if step in wanted:
            kept[step] = picture
        video.add(picture)

    for step, _ in enumerate(play(env, row["seed"])):
        show(step)
    show(env.record.steps)
    video.finish()
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


# -- of held-out episodes, as several policies did them ---------------------------------------------------------------------


@dataclass(frozen=True)
class Take:
    """One episode as one policy did it."""

    policy: str
    video: Path
    cue: str
    right: bool | None  # its last choice; None: it took none
    outcome: str

    @property
    def caption(self) -> str:
        """What came of it, in words."""
        chose = {None: "no choice", True: "chose right", False: "chose wrong"}[self.right]
        return f"{self.policy}: cue {self.cue}, {chose}"


def takes(evaluations: Mapping[str, Path], task: str) -> dict[int, list[Take]]:
    """The episodes of which every policy has a video, by seed. `evaluations` are the folders of `tracemem eval`, by what the
    policies are called.
    """
    cues, found = load(task).cues, dict[int, list[Take]]()
    for policy, folder in evaluations.items():
        for seed, sheet in sorted(lines(folder).items()):
            for video in sorted((folder / "videos").glob(f"{task}-{seed}-*.mp4"))[:1]:
                taken = [each["correct"] for each in sheet["decisions"] if each["choice"] is not None]
                right = taken[-1] if taken else None
                found.setdefault(seed, []).append(Take(policy, video, cues[sheet["cue"]], right, sheet["outcome"]))
    return {seed: each for seed, each in sorted(found.items()) if len(each) == len(evaluations)}


def telling(found: Mapping[int, list[Take]]) -> int:
    """The first episode whose first policy chose wrong and whose last chose right; the first of all if there is none."""
    apart = [seed for seed, each in found.items() if each[0].right is False and each[-1].right is True]
    return (apart or list(found))[0]


def frames(video: Path) -> tuple[list[Any], float]:
    """The pictures of a video, and how many there are in a second."""
    with av.open(str(video)) as file:
        rate, pictures = file.streams.video[0].average_rate, [frame.to_image() for frame in file.decode(video=0)]
    return pictures, float(rate or 10)


def side_by_side(shown: Sequence[Take], out: Path) -> Path:
    """Writes an animated WebP of under 2 MB: the same episode as each policy did it, in step. What came of it is written
    below when a policy has finished; whoever ends first stands still.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    films = [frames(take.video) for take in shown]
    longest, rate = max(len(each) for each, _ in films), films[0][1]
    for width, quality in TRIES:
        height = round(width * films[0][0][0].height / films[0][0][0].width)
        pictures = []
        for number in range(longest):
            whole = Image.new("RGB", (width * len(shown), height + 2 * BAR), "white")
            words = ImageDraw.Draw(whole)
            for place, (take, (film, _)) in enumerate(zip(shown, films, strict=True)):
                whole.paste(film[min(number, len(film) - 1)].resize((width, height)), (place * width, BAR))
                words.text((place * width + 6, 3), take.policy, fill="black", font=font)
                if number >= len(film) - 1:
                    mark = {None: "gray", True: "darkgreen", False: "firebrick"}[take.right]
                    words.text(
                        (place * width + 6, height + BAR + 3), take.caption.partition(": ")[2], fill=mark, font=font
                    )
            pictures.append(whole)
        lasts = [round(1000 / rate)] * (longest - 1) + [round(1000 * HELD)]
        temporary = out.with_name(f"{out.name}.tmp")
        pictures[0].save(
            temporary,
            "WEBP",
            save_all=True,
            append_images=pictures[1:],
            duration=lasts,
            loop=0,
            quality=quality,
            method=4,
        )
        if temporary.stat().st_size < LARGEST:
            break
    temporary.replace(out)
    return out
