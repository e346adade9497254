"""Does a dataset look like a delayed-evidence problem? At many moments of the episodes it is asked how much of what the
robot does next can be predicted from the present frame, and how much more when the first frames are known too. If they help,
and more than shuffled ones do, evidence is delayed. Linear regression on small pictures: a hint, not a proof.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID = 20  # moments of an episode that are looked at
EARLY = 4  # of them count as early: the first fifth
AHEAD = 3  # moments that count as what the robot does next
RIDGES = (0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.3, 1.0, 3.0)  # of the first frames beside the present one
SHUFFLES = 200
SURE, MUCH, PLAIN = 0.01, 0.1, 0.8  # significance; share that must be gained; share that counts as all told
FEWEST = 12  # episodes


@dataclass(frozen=True)
class Evidence:
    """What was found, at the moment where knowing the first frames helps most. Shares are of the variance, between episodes,
    of what the robot does next, predicted for episodes left out.
    """

    episodes: int
    moment: float | None = None  # as a share of the episode
    now: float | None = None  # told by the present frame
    early: float | None = None  # by the first frames
    both: float | None = None
    p: float | None = None  # how often shuffled first frames help as much
    delayed: bool | None = None  # None: cannot be said
    verdict: str = f"Fewer than {FEWEST} episodes: too few to say whether a memory is needed."


def moments(length: int) -> NDArray[np.int64]:
    """The frames of an episode that are looked at."""
    return np.linspace(0, length - 1, GRID).round().astype(np.int64)


def alike(*features: Array) -> Array:
    """How alike episodes are (E, E): scalar products of centred features, every kind of them with the same weight."""
    total = np.zeros((len(features[0]),) * 2)
    for x in features:
        centred = x - x.mean(0)
        product = centred @ centred.T
        total += product * (len(x) / max(float(np.trace(product)), 1e-12))
    return total / len(features)


def told(kernel: Array, next_: Array) -> float:
    """Share of the variance of `next_` that a ridge regression predicts for episodes left out (in closed form)."""
    count = len(kernel)
    y = next_ - next_.mean(0)
    around = float(((y * count / (count - 1)) ** 2).sum())  # what is left if the mean of the others is predicted
    best = -np.inf
    for ridge in RIDGES:
        hat = kernel @ np.linalg.inv(kernel + ridge * np.eye(count)) + 1 / count
        left_out = (y - hat @ y) / (1 - np.diag(hat))[:, None]
        best = max(best, 1 - float((left_out**2).sum()) / max(around, 1e-12))
    return best


def gains(now: list[Array], early: Array, next_: list[Array], base: list[float]) -> list[float]:
    """How much more is told, at each moment, when the first frames are known too."""
    found = []
    for kernel, y, alone in zip(now, next_, base, strict=True):
        found.append(max(told(kernel + weight * early, y) for weight in WEIGHTS) - alone)
    return found


def examine(paths: Sequence[Array], pictures: Array) -> Evidence:
    """`paths`: standardised states of each episode; `pictures`: (episodes, GRID, numbers), small, at their `moments`."""
    count = len(paths)
    if count < FEWEST:
        return Evidence(count)
    states = np.stack([path[moments(len(path))] for path in paths])  # (E, GRID, d)
    early = alike(*(x[:, t] for t in range(EARLY) for x in (pictures, states)))
    times = range(EARLY + 1, GRID - AHEAD)
    now = [alike(pictures[:, t], states[:, t]) for t in times]
    next_: list[Array] = [(states[:, t + 1 : t + 1 + AHEAD] - states[:, t, None]).reshape(count, -1) for t in times]
    base = [told(a, y) for a, y in zip(now, next_, strict=True)]
    gained = gains(now, early, next_, base)
    rng = np.random.default_rng(0)
    orders = [rng.permutation(count) for _ in range(SHUFFLES)]
    by_luck = [max(gains(now, early[np.ix_(order, order)], next_, base)) for order in orders]
    best = int(np.argmax(gained))
    p = (1 + sum(luck >= gained[best] for luck in by_luck)) / (1 + SHUFFLES)
    delayed = bool(p < SURE and gained[best] > max(MUCH, base[best]))  # the present frame tells less than half of it
    words = (
        "No sign of delayed evidence: nowhere do the first frames tell more of what comes than the present frame does."
    )
    if delayed:
        words = (
            "Delayed evidence: what the robot does next depends on what was seen only earlier. A memory should help."
        )
    elif min(base) > PLAIN:
        words = "The present frame tells nearly all of what comes next, everywhere: a policy without memory should do."
    at = times[best]
    return Evidence(
        count, at / (GRID - 1), base[best], told(early, next_[best]), base[best] + gained[best], p, delayed, words
    )
