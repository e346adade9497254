"""The same held-out episodes as several policies did them, beside one another: what came of each, in words, and one moving
picture of an episode with all of them in step. The videos themselves are written by `tracemem eval --videos`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2_000_000  # bytes of a moving picture
TRIES = ((288, 60), (240, 45), (192, 30), (144, 20))  # width of a panel and quality: the first that is small enough
BAR, HELD = 22, 1.5  # pixels of a line of words; seconds for which the end is shown


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
    from trace_bench.tasks import load
    from trace_lab.evaluate import lines

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
    import av

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
