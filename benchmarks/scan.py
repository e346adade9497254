"""Forward and backward of a memory scan at the paper's sizes: a naive loop of steps, the scan, and the scan captured in
CUDA graphs, in one run on one machine. `python benchmarks/scan.py [--device cuda] [--json FILE]`
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from lerobot_policy_trace.capture import GraphedScans
from trace_memory.config import MemoryConfig, build


def milliseconds(work, device: str, repeat: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--memory", default="paper", choices=("paper", "trace"))
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = MemoryConfig(name=options.memory)
    memory = build(config).to(options.device)
    contents = torch.randn(options.batch, options.length, config.content, device=options.device, requires_grad=True)
    path = 0.1 * torch.randn(options.batch, options.length, config.channels, device=options.device).cumsum(1)

    def backward(slots: torch.Tensor, z: torch.Tensor) -> None:
        memory.zero_grad(set_to_none=False)
        contents.grad = None
        (slots.square().mean() + z.square().mean()).backward()

    def naive() -> None:
        state = memory.init(options.batch, device=options.device)
        readouts = []
        for t in range(options.length):
            state, readout = memory.step(state, contents[:, t], path[:, t])
            readouts.append(readout)
        backward(torch.stack([r.slots for r in readouts], 1), torch.stack([r.z for r in readouts], 1))

    def scan() -> None:
        _, readout = memory.scan(contents, path)
        backward(readout.slots, readout.z)

    result = {
        "naive loop of steps": milliseconds(naive, options.device, options.repeat),
        "scan": milliseconds(scan, options.device, options.repeat),
    }
    if options.device == "cuda":
        graphed = GraphedScans(memory, path, [options.length])
        valid = torch.ones(path.shape[:2], dtype=torch.bool, device=path.device)

        def replay() -> None:
            readout = graphed(contents, path, valid)
            backward(readout.slots, readout.z)

        result["scan, CUDA graphs"] = milliseconds(replay, options.device, options.repeat)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, memory {options.memory}, B = {options.batch}, L = {options.length}: forward + backward, median ms")
    for what, value in result.items():
        print(f"  {what:<22} {value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps({"device": name, "milliseconds": result}) + "\n")


if __name__ == "__main__":
    main()
