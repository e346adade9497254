"""Who waits for the lamp, and who only knows how long it usually takes. What follows from it is told by `stats`."""

from collections.abc import Sequence

import numpy as np

from trace_bench.referee import Record

SOON = 20  # steps of the default profile: a lamp that has missed its clock waits so long for its next chance


def waits(records: Sequence[Record]) -> list[tuple[bool, bool]]:
    """Of one task's records, whoever's they are: is the delay drawn in their longest quarter, and does the first lamp
    light in time? It lights only where robots are at rest, so whoever leaves early sees it late or never.
    """
    lit = [frame - each.delay for each in records if (frame := each.decisions[0].frame) is not None]
    limit, long = min(lit, default=0) + SOON, np.quantile([each.delay for each in records], 0.75)
    frames = [each.decisions[0].frame for each in records]
    return [
        (bool(each.delay > long), frame is not None and frame - each.delay <= limit)
        for each, frame in zip(records, frames, strict=True)
    ]
