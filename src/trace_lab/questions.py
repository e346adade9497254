"""What the battery asks: questions, numbers of cues, and conditions in which a trained model is tried without training.
Plain numbers without torch, so that options are checked at once; `stations` draws the episodes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from trace_errors import UsageError

QUESTIONS = {
    "sign": "a bar names the station by its height",
    "place": "the robot returns to the station",
    "order": "stations anywhere, anew each episode: a bar names the first, second, n-th",
    "count": "how many of the glyphs shown are of the colour of the bar",
    "match": "options lie at places drawn anew: where is the one that looks like the named station's glyph?",
    "tmaze": "a cue in the first frame, a corridor, a junction",
}
CUES = (1, 3, 5, 8)
KINDS = 4  # of glyphs, by colour; of options; of the quarters in which they lie
TRAVEL, DWELL, ASK = 4, 4, 3  # steps of the shortest way between stations, at a station, and of the question
LEAD, LATE = 16, 2  # most steps of wandering before the tour, and by which a way is longer: drawn, against the watch
DELAY = 64  # steps of wandering, before and after the tour
LEAST = 8  # of them after the tour
STRIDES = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # frames a step: one of these is drawn for a training batch
CORRIDORS = (100, 1_000, 10_000, 100_000, 1_000_000)  # steps of the T-Maze in which it is tried
SHORTEST = 8  # steps of the T-Maze in training, at least


@dataclass(frozen=True)
class Condition:
    """How the episodes of a task are made longer, or sampled in time.

    Args:
        longer: times the delay.
        frames: a step; each has its own noise and stray patches.
        lose: every so many frames one is lost; 0 for none.
        show: times each frame is shown.
    """

    longer: int = 1
    frames: float = 1.0
    lose: int = 0
    show: int = 1


TRAINED = Condition()
CONDITIONS = {
    "trained": TRAINED,
    "delay_8x": Condition(longer=8),
    "delay_64x": Condition(longer=64),
    "finer_8x": Condition(frames=8),
    "coarser_4x": Condition(frames=0.25),
    "dropped": Condition(lose=3),
    "repeated": Condition(show=2),
}
HARDER = ("delay_64x", "coarser_4x")  # in which 0.90 is enough


@dataclass(frozen=True)
class Task:
    """A question about some cues.

    Args:
        question: one of `QUESTIONS`.
        cues: stations with a glyph each, 1 to 8; the T-Maze has one.
        delay: steps of wandering, before and after the tour; in the T-Maze steps in all.

    Raises:
        UsageError: a value makes no sense; the message names it.

    Example:
        >>> Task("order", cues=3).steps
        91
    """

    question: str = "sign"
    cues: int = 1
    delay: int = DELAY

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS:
            raise UsageError(f"question: got {self.question!r}, expected one of {', '.join(QUESTIONS)}")
        most = 1 if self.maze else max(CUES)
        if not 1 <= self.cues <= most:
            raise UsageError(f"cues: got {self.cues}, expected 1{f' to {most}' if most > 1 else ''} of {self.question}")
        least = SHORTEST if self.maze else LEAD + LATE * self.cues + LEAST
        if self.delay < least:
            raise UsageError(f"delay: got {self.delay}, expected {least} or more")

    @property
    def maze(self) -> bool:
        """Whether it is the T-Maze, which has no tour."""
        return self.question == "tmaze"

    @property
    def steps(self) -> int:
        """Of an episode; the same for all, so that its end tells nothing."""
        return self.delay if self.maze else self.cues * (TRAVEL + DWELL) + self.delay + ASK

    @property
    def classes(self) -> int:
        """How many answers there are, each as often as any other."""
        return {"count": self.cues + 1, "tmaze": 2}.get(self.question, KINDS)

    @property
    def chance(self) -> float:
        """What a guess gets right."""
        return 1 / self.classes

    @property
    def watch(self) -> float | None:
        """What a reader gets right who tells stations apart by their times only: asked for the n-th, it takes the one shown
        nearest to the best time for the n-th (for the first and the last any time that is early or late enough). None where
        the answer is not one station's.
        """
        if self.question in ("count", "tmaze"):
            return None
        late, middle = range(LATE + 1), 0.0
        begins = dict.fromkeys(range(LEAD + 1), 1 / (LEAD + 1))  # how likely the first is shown at t, from any origin
        for _ in range(self.cues - 2):  # the stations between the first and the last
            near = dict.fromkeys((t / 2 for t in range(2 * (max(begins) + 2 * (TRAVEL + DWELL + LATE)))), 0.0)
            after = dict.fromkeys((t + TRAVEL + DWELL + more for t in begins for more in late), 0.0)
            for (begin, likely), before, behind in product(begins.items(), late, late):
                way, next_way = TRAVEL + DWELL + before, TRAVEL + DWELL + behind
                after[begin + way] += likely / len(late) ** 2
                for time in near:  # nearer than the one before and the one behind; half of a tie
                    least, most = begin + way / 2, begin + way + next_way / 2
                    near[time] += likely / len(late) ** 2 * ((least < time < most) + (time in (least, most)) / 2)
            middle, begins = middle + max(near.values()), after
        hit = (middle + min(self.cues, 2)) / self.cues
        return hit + (1 - hit) * self.chance

    def bar(self, condition: str) -> float:
        """The accuracy that a seed's interval must reach."""
        return 1.0 if self.maze else 0.9 if condition in HARDER else 0.95

    def conditions(self, corridors: tuple[int, ...] = CORRIDORS) -> Iterator[tuple[str, "Task", Condition]]:
        """By name what a trained model is tried on; of the T-Maze other lengths instead of other conditions."""
        if self.maze:
            yield "trained", self, TRAINED
            for steps in corridors:
                yield f"steps_{steps}", Task(self.question, self.cues, steps), TRAINED
        else:
            for name, condition in CONDITIONS.items():
                yield name, self, condition


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share.

    Example:
        >>> low, high = wilson(95, 100)
        >>> round(low, 3), round(high, 3)
        (0.888, 0.978)
    """
    z, share = 1.959963984540054, right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), 1.0 if right == of else middle + half
