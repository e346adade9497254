"""Signatures of chosen frames of long paths, on the CPU: stretches through pysiglib against streaming every prefix in torch.
`python benchmarks/signature.py`
"""

import statistics
import time

import torch

from trace_memory.memory import history_indices
from trace_memory.signature import Signature


def milliseconds(work, repeat: int = 5) -> float:
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    signature = Signature(17, 3)
    print("17 channels, depth 3, float32, batch 8, 32 frames chosen by I_{L,r}(t) with r = 8; median ms")
    for length in (100, 400, 1600):
        path = 0.1 * torch.randn(8, length, 17).cumsum(1)
        indices, _ = history_indices(torch.full((8,), length - 1), 32, 8)
        at = milliseconds(lambda path=path, indices=indices: signature.at(path, indices))
        stream = milliseconds(lambda path=path: signature.stream(path))
        print(
            f"  {length:5d} frames: at (pysiglib) {at:8.1f}   stream, then gather {stream:8.1f}   ratio {at / stream:.2f}"
        )


if __name__ == "__main__":
    main()
