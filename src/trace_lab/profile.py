"""`tracemem profile`: what a control step costs, part by part, with a memory and without, in one run on one machine; and
whether it stays so over a long run. The table has the paper's columns.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.control import Control
from lerobot_policy_trace.frozen import PRECISIONS, captured, computing, exactly
from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy
from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_lab.dataset import write_json
from trace_lab.recipe import PRESETS
from trace_memory.memory import MemoryState, TraceMemory
from trace_memory.signature import SignatureState

CHANNELS = 17
CAMERAS = ("overhead", "left_wrist", "right_wrist")
PARTS = 2_000  # times a part is measured at most
FEW = 200  # times what no claim rests on is
WARM_UP = 20
POOL, PATH = 32, 4_096  # different pictures and robot states a run goes through, again and again
CACHE = (
    128 << 20
)  # bytes written before each measurement of a part, so that it finds its weights where a robot's step does
PAPER = {"act": (5.90, 0.52, 0.90, 0.58, 0.10, 2.11, 8.32), "diffusion": (118.0, 0.52, 0.90, 0.58, 0.14, 2.15, 120.46)}
COLUMNS = ("base forward", "signature", "slot update", "readout", "adapter", "TRACE overhead", "total loop")


@dataclass(frozen=True)
class Timing:
    """Milliseconds, over so many calls."""

    mean: float
    p95: float
    median: float
    calls: int

    @classmethod
    def of(cls, milliseconds: NDArray[np.float32]) -> "Timing":
        """Of all calls."""
        x = milliseconds.astype(np.float64)
        return cls(float(x.mean()), float(np.quantile(x, 0.95)), float(np.median(x)), len(x))

    def __str__(self) -> str:
        digits = 3 if self.mean < 1 else 2
        return f"{self.mean:.{digits}f} / {self.p95:.{digits}f}"


class Stopwatch:
    """Measures calls, on a device, for at most so many seconds each."""

    def __init__(self, device: torch.device, steps: int, seconds: float, progress: Progress):
        self.device, self.steps, self.seconds, self.progress = device, steps, seconds, progress
        self.cuda = device.type == "cuda"

    def wall(self, what: str, call: Callable[[int], Any], steps: int | None = None) -> NDArray[np.float32]:
        """What a robot waits: from the call to its result."""
        steps = min(self.steps, steps or self.steps)
        times, limit = np.full(steps, np.nan, np.float32), time.perf_counter() + self.seconds
        task = self.progress.add_task(what, total=steps)
        for number in range(-min(WARM_UP, steps), steps):
            begun = time.perf_counter()
            call(number)
            if self.cuda:
                torch.cuda.synchronize()
            if number >= 0:
                times[number] = (time.perf_counter() - begun) * 1e3
            if number % 100 == 0:
                self.progress.update(task, completed=max(0, number))
            if time.perf_counter() > limit and number >= WARM_UP:
                return self._told(what, task, times[: number + 1])
        return self._told(what, task, times)

    def _told(self, what: str, task: TaskID, times: NDArray[np.float32]) -> NDArray[np.float32]:
        """Where nobody sees the bar, a line a measurement."""
        self.progress.update(task, completed=self.progress.tasks[self.progress.task_ids.index(task)].total)
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{what}: {Timing.of(times)} ms ({len(times)} calls)", highlight=False)
        return times

    def part(self, what: str, program: Callable[[], Any], precision: str) -> Timing:
        """What a part takes by itself: on a GPU the device's own time for it as a graph, with cold caches."""
        with torch.no_grad(), computing(self.device, precision):
            if not self.cuda:
                return Timing.of(self.wall(what, lambda _: program(), PARTS))
            replay = captured(program)
        cache = torch.zeros(CACHE, dtype=torch.uint8, device=self.device)
        times, block, count = [], 50, min(self.steps, PARTS) + WARM_UP
        task = self.progress.add_task(what, total=count)
        for _ in range(0, count, block):
            marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(block)]
            for begin, end in marks:
                cache.zero_()
                begin.record()
                replay()
                end.record()
            torch.cuda.synchronize()
            times += [begin.elapsed_time(end) for begin, end in marks]
            self.progress.advance(task, block)
        return Timing.of(self._told(what, task, np.array(times[WARM_UP:], np.float32)))


# -- what is measured ------------------------------------------------------------------------------------------------------


def make(kind: str, preset: str, memory: str, size: int, device: str, *, stock: bool = False) -> Any:
    """A policy of a preset's sizes with random weights: ours, or LeRobot's own."""
    torch.manual_seed(0)
    chosen = PRESETS[preset][kind]
    pictures = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, size, size)) for name in CAMERAS}
    options: dict[str, Any] = dict(chosen.policy_options)
    if kind == "diffusion":
        options["crop_shape"] = (size * 7 // 8,) * 2  # as LeRobot's 84 of 96
    options |= {
        "input_features": {OBS_STATE: PolicyFeature(FeatureType.STATE, (CHANNELS,)), **pictures},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (CHANNELS,))},
        "device": device,
    }
    classes: dict[str, tuple[Any, Any]] = {
        "act": (TraceActConfig, TraceActPolicy),
        "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy),
    }
    if stock:
        classes = {"act": (ACTConfig, ACTPolicy), "diffusion": (DiffusionConfig, DiffusionPolicy)}
    else:
        options["memory"] = MemoryOptions(name=memory, **chosen.memory_options)
    config, policy = classes[kind]
    made = policy(config(**options)).to(device).eval()
    if getattr(made, "recall", None) is not None:
        made.recall.frames.fill_(1)  # statistics of random weights would mean nothing
    return made


class Observations:
    """Noise pictures and a robot state that wanders without end, already on the device."""

    def __init__(self, size: int, device: str):
        generator = torch.Generator().manual_seed(0)
        self.pictures = [
            {
                f"observation.images.{name}": torch.randn(1, 3, size, size, generator=generator).to(device)
                for name in CAMERAS
            }
            for _ in range(POOL)
        ]
        state, path = torch.zeros(1, CHANNELS), []
        for _ in range(PATH):
            state = 0.99 * state + 0.1 * torch.randn(1, CHANNELS, generator=generator)
            path.append(state.to(device))
        self.path = path

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        state = self.path[number % PATH]
        return self.pictures[number % POOL] | {OBS_STATE: state, RAW_STATE: state}


def parts(control: Control) -> dict[str, Callable[[], Any]]:
    """TRACE's computation as the paper cuts it, on the buffers of a compiled policy; other memories are not cut."""
    recall = control.policy.recall
    memory, adapter, raw = recall.memory, recall.adapter, control.given[RAW_STATE]
    state, content = memory.init(1), torch.randn(1, memory.content, device=control.device)
    state = MemoryState(state.steps + 1, state.cells)
    features = torch.randn(1, 30, getattr(control.config, "dim_model", 1), device=control.device)

    def exact(part: Callable[[], Any]) -> Callable[[], Any]:
        """As the memory computes, whatever the policy's precision is."""

        def run() -> Any:
            with exactly(), torch.autocast(control.device.type, enabled=False):
                return part()

        return run

    def adapt(readout: Any) -> Any:
        return adapter(features, readout) if hasattr(adapter, "attention") else adapter(readout)

    remember = exact(lambda: control.remember(state, content, raw))
    found: dict[str, Callable[[], Any]] = {"TRACE overhead": lambda: adapt(remember()[1])}
    with torch.no_grad():
        _, readout = remember()
    found["adapter"] = lambda: adapt(readout)
    if type(memory) is TraceMemory and not memory.keys.anchor:
        path = SignatureState(state.cells["point"], state.cells["xi"], state.steps)
        slots = memory.slots

        def signature() -> Any:
            return memory.signature.step(path, memory.normaliser.state(raw))

        with torch.no_grad():
            _, xi, delta = signature()

        def update() -> Any:
            key = memory.keys(memory.normaliser.xi(xi), memory.normaliser.delta(delta))
            drive = slots.prepare(content, key, slots.maps())
            return drive, slots.write(state.cells["slots"], drive, slots.maps())

        with torch.no_grad():
            drive, written = update()

        def read() -> Any:
            return slots.read(written.slots, drive)

        cut = {"signature": signature, "slot update": update, "readout": read}
        found |= {name: exact(control.fused(part)) for name, part in cut.items()}
    return found


def encode(control: Control) -> Callable[[], Any]:
    """The pictures of one step."""
    return lambda: control._encode([control.given[key][:, None] for key in control.cameras])


# -- one policy -----------------------------------------------------------------------------------------------------------


def resident() -> float | None:
    """Megabytes of memory this process holds, where that can be known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return None


def long_run(policy: Any, given: Observations, watch: Stopwatch, what: str) -> dict[str, Any]:
    """The control loop for many steps: how long steps take where a new chunk is made and where not, and what changes."""
    control: Control = policy.control
    held: list[float | None] = []
    finite, largest = True, 0.0

    def step(number: int) -> None:
        nonlocal finite, largest
        action = policy.select_action(given[number])
        if number % 1_000 == 0:
            held.append(resident())
            values = torch.cat([action.flatten(), control.carried.flatten()]).abs()
            finite, largest = finite and bool(values.isfinite().all()), max(largest, float(values.max()))

    policy.reset()
    times = watch.wall(what, step)
    begins = np.zeros(len(times), bool)
    begins[(-WARM_UP) % control.every :: control.every] = True  # the warm-up steps count as steps of the episode
    tenth = max(1, len(times) // 10)
    early = held[len(held) // 10]
    return {
        "steps": len(times),
        "chunk": vars(Timing.of(times[begins])) if begins.any() else None,
        "between": vars(Timing.of(times[~begins])) if not begins.all() else None,
        "all": vars(Timing.of(times)),
        "cut": len(times) < watch.steps,
        "drift": float(np.median(times[-tenth:]) / np.median(times[:tenth])),
        "resident_growth_mb": None if early is None or held[-1] is None else held[-1] - early,
        "finite": finite,
        "largest": largest,
    }


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """CPU threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    kind: str, preset: str, memory: str, size: int, precision: str, watch: Stopwatch, *, base: bool, fuse: bool | None
) -> dict[str, Any]:
    """All figures of one policy."""
    device, title = str(watch.device), f"{kind} {size} px"
    given = Observations(size, device)
    before = torch.cuda.memory_allocated() if watch.cuda else 0
    found: dict[str, Any] = {"policy": kind, "memory": memory, "size": size, "precision": precision}
    policy = make(kind, preset, memory, size, device)
    control = policy.compile_for_control(precision=precision, fuse=fuse)
    found |= {"error": control.error, "state_bytes": policy.recall.memory.state_bytes if policy.recall else 0}
    if watch.cuda:
        torch.cuda.reset_peak_memory_stats()
    found["loop"] = long_run(policy, given, watch, f"{title}: control loop, memory {memory}")
    if watch.cuda:
        found["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    cut = parts(control) if policy.recall is not None else {}
    found["parts"] = {name: vars(watch.part(f"{title}: {name}", part, precision)) for name, part in cut.items()}
    found["parts"]["encode"] = vars(watch.part(f"{title}: encode", encode(control), precision))
    policy.reset()
    found["total loop"] = vars(
        Timing.of(watch.wall(f"{title}: a chunk every step", lambda n: policy.predict_action_chunk(given[n]), PARTS))
    )
    if base:
        policy.control = None
        policy.reset()
        found["eager with memory"] = vars(
            Timing.of(watch.wall(f"{title}: eager", lambda n: policy.predict_action_chunk(given[n]), FEW))
        )
        del policy, control, cut
        stock = make(kind, preset, "none", size, device, stock=True)

        def predict(number: int) -> Any:
            batch = given[number]
            return stock.predict_action_chunk(
                stacked(batch, stock.config.n_obs_steps) if kind == "diffusion" else batch
            )

        found["base forward"] = vars(Timing.of(watch.wall(f"{title}: stock LeRobot", predict, PARTS)))
        del stock
        bare = make(kind, preset, "none", size, device)
        bare.compile_for_control(precision=precision, fuse=fuse)
        found["base compiled"] = vars(
            Timing.of(watch.wall(f"{title}: stock, compiled", lambda n: bare.predict_action_chunk(given[n]), PARTS))
        )
        found["added"] = found["total loop"]["mean"] - found["base compiled"]["mean"]
    return found


def stacked(batch: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    """What Diffusion Policy takes outside of its queues: the last observations, here the same."""
    return {key: x[:, None].expand(-1, steps, *x.shape[1:]) for key, x in batch.items()}


# -- the command -----------------------------------------------------------------------------------------------------------


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """The paper's table, lying on its side, with what it does not have below; and the long run."""
    names = [f"{found['policy']} {found['size']} px" for found in results]
    kinds = list(dict.fromkeys(found["policy"] for found in results))
    main = Table("ms a step, mean / p95", *names, *(f"paper, {kind}" for kind in kinds))

    def line(name: str, cells: list[str], paper: list[str]) -> None:
        main.add_row(name, *cells, *(paper or [""] * len(kinds)))

    def told(timing: dict[str, Any] | None) -> str:
        return str(Timing(**timing)) if timing else "-"

    every = [found["parts"] | found for found in results]
    for place, name in enumerate(COLUMNS):
        line(name, [told(found.get(name)) for found in every], [f"{PAPER[kind][place]:.2f}" for kind in kinds])
    shares = [
        f"{100 * found['TRACE overhead']['mean'] / found['base forward']['mean']:.1f} %"
        if "TRACE overhead" in found and "base forward" in found
        else "-"
        for found in every
    ]
    line("overhead / base forward", shares, [f"{100 * PAPER[kind][5] / PAPER[kind][0]:.1f} %" for kind in kinds])
    main.add_section()
    line("step between chunks", [told(found["loop"]["between"]) for found in results], [])
    for name in ("encode", "eager with memory", "base compiled"):
        line(name, [told(found.get(name)) for found in every], [])
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
    memory: str = "trace",
    sizes: tuple[int, ...] = (96,),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: str = "auto",
    fuse: bool | None = None,
    steps: int = 2_000,
    seconds: float = 120.0,
    threads_: Annotated[int | None, tyro.conf.arg(name="threads")] = None,
    base: bool = True,
    out: Path | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Measures what a control step costs, with a memory and without, on this machine, in one run.

    Policies have a preset's sizes and random weights, observations are noise: neither changes what a step costs. Steps are
    those of a compiled policy (policy.compile_for_control()); base forward is LeRobot's own policy as it comes. With many
    steps (--steps 1000000 --seconds 3600 --no-base) it is a soak test: memory use, latency drift and finite values are told.

    Args:
        policies: act, diffusion or both.
        preset: sizes; paper has LeRobot's policies as they are and the paper's memory.
        memory: trace, or another of the comparison (tracemem params lists them).
        sizes: width and height of the three pictures, pixels.
        device: where; auto takes a GPU if there is one.
        precision: of the compiled policy: float32, tf32 (GPU), bf16, fp16 (CPU: the memory's weights); auto is tf32 on a
            GPU and float32 on a CPU.
        fuse: join the memory's small operations with torch.compile; on a GPU if not said.
        steps: control steps of the loop, after a warm-up; parts are measured 2,000 times at most.
        seconds: a measurement stops after so long, whatever is missing, and is told to be cut; raise it for soak tests.
        threads_: CPU threads; all if not said.
        base: also measure LeRobot's stock policy, and ours without the compiled path.
        out: folder for profile.json and profile.png.
        json_: print JSON instead of tables.
    """
    console = Console(stderr=json_)

    def refuse(field: str, came: object, expected: str) -> int:
        console.print(f"tracemem profile: {field}: got {came}, expected {expected}", highlight=False, markup=False)
        return 2

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    precision = {"cuda": "tf32", "cpu": "float32"}[place] if precision == "auto" else precision
    if precision not in PRECISIONS:
        return refuse("precision", precision, f"auto or one of {', '.join(PRECISIONS)}")
    if (precision, place) in {("tf32", "cpu"), ("fp16", "cuda")}:
        return refuse("precision", f"{precision} on {place}", PRECISIONS[precision])
    if steps < 100 or seconds <= 0 or not all(size >= 32 for size in sizes):
        return refuse("steps, seconds, sizes", (steps, seconds, sizes), "at least 100, more than 0, at least 32 each")
    if place == "cuda" and not torch.cuda.is_available():
        return refuse("device", "cuda, but PyTorch sees none here", "cpu or auto")
    try:
        MemoryOptions(name=memory)
    except ValueError as error:
        return refuse("memory", memory, str(error))
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
                results.append(measure(kind, preset, memory, size, precision, watch, base=base, fuse=fuse))
                made = {"machine": machine, "torch": torch.__version__, "preset": preset, "results": results}
                if out is not None:
                    write_json(out / "profile.json", made)  # after each: a long run that is stopped keeps what it has
                for task in progress.task_ids:
                    progress.remove_task(task)
    for table in tables(results):
        console.print(table)
    console.print(
        f"{machine}, PyTorch {torch.__version__}, preset {preset}, precision {precision}, one robot, three cameras"
    )
    clock = "the device's time, caches cold" if place == "cuda" else "wall clock"
    console.print(f"Parts (signature to TRACE overhead, encode): {clock}; steps: wall clock, from call to action.")
    if out is not None:
        draw(results, out / "profile.png")
        console.print(f"Wrote {out / 'profile.json'} and {out / 'profile.png'}")
    if json_:
        print(json.dumps(made))  # noqa: T201
    return 0
