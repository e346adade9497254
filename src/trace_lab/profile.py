"""`tracemem profile`: what a control step costs, part by part, with a memory and without, in one run on one machine; and
whether it stays so over a long run. The table has the paper's columns, as its rows.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trace_errors import UsageError
from trace_lab.recipe import known
from trace_memory.registry import METHODS

PAPER = {"act": (5.90, 0.52, 0.90, 0.58, 0.10, 2.11, 8.32), "diffusion": (118.0, 0.52, 0.90, 0.58, 0.14, 2.15, 120.46)}
COLUMNS = ("base forward", "signature", "slot update", "readout", "adapter", "TRACE overhead", "total loop")


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """The paper's table, its columns as rows, with what it does not have below; and the long run."""
    from trace_lab.stopwatch import Timing

    names = [f"{found['policy']} {found['size']} px" for found in results]
    kinds = list(dict.fromkeys(found["policy"] for found in results))
    main = Table("ms a step, mean / p95", *names, *(f"paper, {kind}" for kind in kinds))

    def line(name: str, cells: list[str], paper: list[str]) -> None:
        main.add_row(name, *cells, *(paper or [""] * len(kinds)))

    def text(timing: dict[str, Any] | None) -> str:
        return str(Timing(**timing)) if timing else "-"

    every = [found["parts"] | found for found in results]
    for place, name in enumerate(COLUMNS):
        line(name, [text(found.get(name)) for found in every], [f"{PAPER[kind][place]:.2f}" for kind in kinds])
    shares = [
        f"{100 * found['TRACE overhead']['mean'] / found['base forward']['mean']:.1f} %"
        if "TRACE overhead" in found and "base forward" in found
        else "-"
        for found in every
    ]
    line("overhead / base forward", shares, [f"{100 * PAPER[kind][5] / PAPER[kind][0]:.1f} %" for kind in kinds])
    main.add_section()
    line("step between chunks", [text(found["loop"]["between"]) for found in results], [])
    for name in ("encode", "eager with memory", "base compiled"):
        line(name, [text(found.get(name)) for found in every], [])
    adds = [
        f"{100 * found['added'] / found['base compiled']['mean']:.1f} %" if "added" in found else "-"
        for found in results
    ]
    line("total less base compiled", [f"{found['added']:.3f}" if "added" in found else "-" for found in results], [])
    line("  of base compiled", adds, [])
    line("error against float32", [f"{found['error']:.2g}" for found in results], [])
    line("state, bytes", [f"{found['state_bytes']:,}" for found in results], [])
    line("peak GPU memory, MB", [f"{found['peak_mb']:.0f}" if "peak_mb" in found else "-" for found in results], [])
    long = Table("policy", "steps", "drift of the median", "memory grew by", "finite", title="The long run")
    for name, found in zip(names, results, strict=True):
        loop, grew = found["loop"], found["loop"]["resident_growth_mb"]
        growth = "not known here" if grew is None else f"{grew:.2f} MB"
        steps = f"{loop['steps']:,}{' (out of time)' if loop['cut'] else ''}"
        long.add_row(name, steps, f"{loop['drift']:.3f}", growth, "yes" if loop["finite"] else "NO")
    return [main, long]


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Bars: the stock step, ours with a new chunk, ours between chunks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 1.1 * len(results)))
    shown = [("stock LeRobot", "base forward"), ("with memory, compiled", "total loop"), ("between chunks", "between")]
    for place, found in enumerate(results):
        for number, (label, name) in enumerate(shown):
            timing = found["loop"]["between"] if name == "between" else found.get(name)
            if timing:
                y = place + 0.25 * (number - 1)
                bar = axes.barh(y, timing["mean"], 0.22, color=f"C{number}", label=label if place == 0 else None)
                axes.bar_label(bar, [f"{timing['mean']:.2f} ms"], padding=3, fontsize=8)
    axes.set_yticks(range(len(results)), [f"{found['policy']}, {found['size']} px" for found in results])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a step (mean)")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def profile(
    *,
    policies: tuple[Literal["act", "diffusion"], ...] = ("act", "diffusion"),
    preset: Literal["paper", "default", "tiny"] = "paper",
    memory: str | None = None,
    sizes: tuple[int, ...] = (96,),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "float32", "tf32", "bf16", "fp16"] = "auto",
    fuse: bool | None = None,
    steps: int = 2_000,
    seconds: float | None = None,
    threads_: Annotated[int | None, tyro.conf.arg(name="threads")] = None,
    base: bool = True,
    out: Path | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Measures what a control step costs, with a memory and without, on this machine, in one run.

    Policies have a preset's sizes and random weights, observations are noise: neither changes what a step costs. Steps are
    those of a compiled policy (policy.compile_for_control()); base forward is LeRobot's own policy as it comes. With many
    steps (--steps 1000000 --no-base) it is a soak test: memory use, latency drift and finite values are told.

    Args:
        policies: act, diffusion or both.
        preset: sizes; paper has LeRobot's policies as they are and the paper's memory.
        memory: which memory (tracemem params lists them); the preset's own if not said.
        sizes: width and height of the three pictures, pixels.
        device: where; auto takes a GPU if there is one.
        precision: of the compiled policy: float32, tf32 (GPU), bf16, fp16 (CPU: the memory's weights); auto is tf32 on a
            GPU and float32 on a CPU.
        fuse: join the memory's small operations with torch.compile; on a GPU if not said.
        steps: control steps of the loop, after a warm-up; parts are measured 2,000 times at most.
        seconds: a measurement stops after so long, whatever is missing; 30 if not said, except for a loop of more than 2,000
            steps, which is not stopped.
        threads_: CPU threads; all if not said.
        base: also measure LeRobot's stock policy, and ours without the compiled path.
        out: folder for profile.json and profile.png.
        json_: print JSON instead of tables.
    """
    if steps < 100 or (seconds is not None and seconds <= 0) or not all(size >= 32 for size in sizes):
        got, expected = (steps, seconds, sizes), "at least 100, more than 0, at least 32 each"
        raise UsageError(f"--steps, --seconds, --sizes: got {got}, expected {expected}")
    if memory is not None:
        known("--memory", memory, list(METHODS))
    import torch

    from lerobot_policy_trace.compiled import PRECISIONS
    from trace_lab.rollout import device_of
    from trace_lab.run import write_json
    from trace_lab.stopwatch import Stopwatch, measure, threads

    console, place = Console(stderr=json_), device_of(device)
    chosen: str = {"cuda": "tf32", "cpu": "float32"}[place] if precision == "auto" else precision
    if (chosen, place) in {("tf32", "cpu"), ("fp16", "cuda")}:
        raise UsageError(
            f"--precision: got {chosen} on {place}, expected another; {chosen} is for {PRECISIONS[chosen]}"
        )
    machine = torch.cuda.get_device_name() if place == "cuda" else f"CPU, {threads_ or torch.get_num_threads()} threads"
    results: list[dict[str, Any]] = []
    made: dict[str, Any] = {}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), *Progress.get_default_columns()[1:3], TimeRemainingColumn())
    with threads(threads_), Progress(*columns, console=console, transient=True) as progress:
        watch = Stopwatch(torch.device(place), steps, seconds, progress)
        for kind in policies:
            for size in sizes:
                results.append(measure(kind, preset, memory, size, chosen, watch, base=base, fuse=fuse))
                made = {"machine": machine, "torch": torch.__version__, "preset": preset, "results": results}
                if out is not None:
                    write_json(out / "profile.json", made)  # after each: a long run that is stopped keeps what it has
                for task in progress.task_ids:
                    progress.remove_task(task)
    for table in tables(results):
        console.print(table)
    console.print(
        f"{machine}, PyTorch {torch.__version__}, preset {preset}, precision {chosen}, one robot, three cameras"
    )
    clock = "the device's time, caches cold" if place == "cuda" else "wall clock"
    console.print(f"Parts (signature to TRACE overhead, encode): {clock}; steps: wall clock, from call to action.")
    if out is not None:
        draw(results, out / "profile.png")
        console.print(f"Wrote {out / 'profile.json'} and {out / 'profile.png'}")
    if json_:
        print(json.dumps(made))  # noqa: T201
    return 0
