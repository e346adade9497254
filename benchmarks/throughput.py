"""Targets a second: TRACE-ACT with the episode scan against stock ACT under lerobot-train, on one dataset in one run, at the
same batch of targets. Prints a table, and with --json also writes it.

    python benchmarks/throughput.py DATASET --batch 256 --workers 4 16
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from trace_lab.frames import open_dataset, open_frames
from trace_lab.recipe import parse, recipe
from trace_lab.training import Training


def stock(dataset: Path, batch: int, workers: int, steps: int, device: str) -> dict:
    """lerobot-train's own figures for its last updates: seconds to compute and seconds waiting for data."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "lerobot.scripts.lerobot_train", "--policy.type=act", f"--policy.device={device}",
            "--policy.pretrained_backbone_weights=null", "--policy.push_to_hub=false", f"--dataset.root={dataset}",
            "--dataset.repo_id=local/dataset", f"--batch_size={batch}", f"--num_workers={workers}", f"--steps={steps}",
            f"--log_freq={max(1, steps // 4)}", "--save_checkpoint=false", "--wandb.enable=false", f"--output_dir={out}/run",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    text = done.stdout + done.stderr
    found = [tuple(map(float, each)) for each in re.findall(r"updt_s:([\d.]+) data_s:([\d.]+)", text)]
    if done.returncode or len(found) < 2:
        raise SystemExit(f"lerobot-train failed:\n{text[-3000:]}")
    later = found[len(found) // 2 :]  # the first stretches have the start-up in them, and batches loaded meanwhile
    compute, data = (sum(column) / len(later) for column in zip(*later, strict=True))
    return {"targets/s": batch / (compute + data), "compute ms": 1e3 * compute, "data ms": 1e3 * data}


def clock(work, repeats: int, device: str) -> float:
    """Milliseconds a call."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def ours(store, changes: dict, memory: str, repeats: int, device: str) -> dict:
    """An update of our engine, and its parts apart."""
    made = recipe("paper", "act", memory, changes)
    training = Training.begin(made, 0, store, Accelerator(cpu=device == "cpu", mixed_precision="no"))
    begin = time.perf_counter()
    training.update()
    row = {"first update s": round(time.perf_counter() - begin, 1)}
    for _ in range(2):
        training.update()
    step = clock(training.update, repeats, device)
    row |= {"targets/s": 1e3 * made.batch / step, "update ms": step}
    if memory != "none":
        apart = parts(training, repeats, device)
        row |= apart | {"policy ms": step - sum(apart.values())}  # and the optimiser's step
    if device == "cuda":
        row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return row


def parts(training: Training, repeats: int, device: str) -> dict:
    """What an update does before the policy: the batch; forward and backward of encoder and scan, each alone."""
    policy, batches = training.policy, training.batches
    batch = batches.at(0)
    known, captured = batch.memory, None if training.programs is None else training.programs.scan
    with training.autocast, torch.no_grad():
        maps = policy.encode(list(batch.frames))
        contents = policy.memory_head.content(maps, known.states).float()[known.written]
    contents.requires_grad_()

    def encode() -> None:
        with training.autocast:
            sum(x.float().mean() for x in policy.encode(list(batch.frames))).backward()

    def scan() -> None:
        if captured is not None:
            captured(contents, known.path, known.valid).z.sum().backward()
        else:
            policy.memory_head.memory.scan(contents, known.path, known.valid)[1].z.sum().backward()

    named = {"data ms": lambda: batches.at(0), "encoder ms": encode, "scan ms": scan}
    return {name: clock(work, repeats, device) for name, work in named.items()}


def table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cell = lambda value: f"{value:,.1f}" if isinstance(value, float) else str(value)  # noqa: E731
    lines = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--episodes", type=int, nargs="+", default=[4], help="episodes among which a batch is divided")
    parser.add_argument("--workers", type=int, nargs="*", default=[4])
    parser.add_argument("--steps", type=int, default=40, help="updates of each measurement")
    parser.add_argument(
        "--stock-steps", type=int, help="of lerobot-train; by default enough to use up what is loaded early"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []

    def note(what: str, row: dict) -> None:
        rows.append({"what": what} | row)
        print(table(rows[-1:]), flush=True)

    extra = parse(given.set)
    begin = time.perf_counter()
    store = open_frames(open_dataset(given.dataset), given.device)
    rows.append({"what": f"decoding {store.bytes / 1e9:.2f} GB into {store.place}", "s": time.perf_counter() - begin})
    for episodes in given.episodes:
        changes = {"episodes": episodes, "targets": given.batch // episodes} | extra
        name = f"TRACE-ACT, {episodes} episodes x {given.batch // episodes} targets"
        note(name, ours(store, changes, "trace", given.steps, given.device))
    changes = {"episodes": given.episodes[0], "targets": given.batch // given.episodes[0]} | extra
    note("ACT without memory, our engine", ours(store, changes, "none", given.steps, given.device))
    del store
    for workers in given.workers:
        steps = given.stock_steps or 16 + 4 * workers
        row = stock(given.dataset, given.batch, workers, steps, given.device)
        note(f"stock ACT, lerobot-train, {workers} workers", row)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
