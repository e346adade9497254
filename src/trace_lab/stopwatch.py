"""How long a policy's control steps take, part by part, and whether that stays so over many of them. `Stopwatch` measures
calls on a CPU and on a GPU; `measure` makes a policy and has all of it measured. The command and its table are in `profile`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.modeling_act import ACTConfig, ACTPolicy
from lerobot.policies.diffusion.modeling_diffusion import DiffusionConfig, DiffusionPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from numpy.typing import NDArray
from rich.progress import Progress, TaskID

from lerobot_policy_trace import (
    MemoryOptions,
    TraceActConfig,
    TraceActPolicy,
    TraceDiffusionConfig,
    TraceDiffusionPolicy,
)
from lerobot_policy_trace.capture import replayed
from lerobot_policy_trace.compiled import computing
from lerobot_policy_trace.memory_head import exact_products
from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_lab.recipe import recipe
from trace_memory.memory import MemoryState
from trace_memory.signature import SignatureState
from trace_memory.trace import DeployedMemory, SlotMemory

PARTS = 2_000  # times a part is measured at most
FEW = 200  # times what no claim rests on is measured
WARM_UP = 20
SECONDS = 30.0  # for a measurement, unless told otherwise; longer runs than those of parts take what they need
# Bytes written before each measurement of a part, so that it finds its weights where a robot's step does.
CACHE = 128 << 20
CHANNELS = 17
CAMERAS = ("overhead", "left_wrist", "right_wrist")
POOL, PATH = 32, 4_096  # different pictures and robot states a run goes through, again and again


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
    """Measures calls, on a device, for at most so many seconds each (`SECONDS` if None)."""

    def __init__(self, device: torch.device, steps: int, seconds: float | None, progress: Progress):
        self.device, self.steps, self.seconds, self.progress = device, steps, seconds, progress
        self.cuda = device.type == "cuda"

    def wall(self, what: str, call: Callable[[int], Any], steps: int | None = None) -> NDArray[np.float32]:
        """What a robot waits: from the call to its result."""
        steps = min(self.steps, steps or self.steps)
        usual = SECONDS if steps <= PARTS else math.inf
        limit = time.perf_counter() + (usual if self.seconds is None else self.seconds)
        times = np.full(steps, np.nan, np.float32)
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
        self.progress.update(task, completed=len(times), total=len(times))
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{what}: {Timing.of(times)} ms ({len(times)} calls)", highlight=False)
        return times

    def part(self, what: str, program: Callable[[], Any], precision: str) -> Timing:
        """What a part takes by itself: on a GPU the device's own time for it as a graph, with cold caches."""
        with torch.no_grad(), computing(self.device, precision):
            if not self.cuda:
                return Timing.of(self.wall(what, lambda _: program(), PARTS))
            replay = replayed(program)
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


def resident() -> float | None:
    """Megabytes of memory this process holds, where that can be known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """CPU threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(kind: str, preset: str, memory: str | None, size: int, device: str, *, stock: bool = False) -> Any:
    """A policy of a preset's sizes with random weights: with a memory (None: the preset's own), or LeRobot's own."""
    torch.manual_seed(0)
    chosen = recipe(preset, kind, memory)
    pictures = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, size, size)) for name in CAMERAS}
    options: dict[str, Any] = dict(chosen.policy_options)
    if kind == "diffusion":
        options["crop_shape"] = (size * 7 // 8,) * 2  # as LeRobot's 84 of 96
    options |= {
        "input_features": {OBS_STATE: PolicyFeature(FeatureType.STATE, (CHANNELS,)), **pictures},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (CHANNELS,))},
        "device": device,
    }
    if stock:
        made = ACTPolicy(ACTConfig(**options)) if kind == "act" else DiffusionPolicy(DiffusionConfig(**options))
        return made.to(device).eval()
    options["memory"] = MemoryOptions(name=chosen.memory, **chosen.memory_options)
    ours: Any = (
        TraceActPolicy(TraceActConfig(**options))
        if kind == "act"
        else TraceDiffusionPolicy(TraceDiffusionConfig(**options))
    )
    if ours.memory_head is not None:
        ours.memory_head.frames.fill_(1)  # statistics of random weights would mean nothing
    return ours.to(device).eval()


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


def parts(session: Any) -> dict[str, Callable[[], Any]]:
    """What a memory adds to a step as the paper cuts it, by the memory's own methods. Memories without slots are not cut."""
    head, device = session.policy.memory_head, session.device
    memory, adapter = head.memory, head.adapter
    content, raw = torch.randn(1, memory.content, device=device), torch.randn(1, CHANNELS, device=device)
    begun = memory.init(1)
    state = MemoryState(begun.steps + 1, begun.tensors)

    def exact(part: Callable[[], Any]) -> Callable[[], Any]:
        """As the memory computes, whatever the policy's precision is."""

        def run() -> Any:
            with exact_products(), torch.autocast(device.type, enabled=False):
                return part()

        return run

    step = exact(lambda: session.advance(state, content, raw))
    with torch.no_grad():
        _, readout = step()
    found = {"TRACE overhead": lambda: adapter(step()[1]), "adapter": lambda: adapter(readout)}
    if not isinstance(memory, SlotMemory | DeployedMemory):
        return found
    slots, maps = (memory.memory, memory.maps) if isinstance(memory, DeployedMemory) else (memory, memory.slots.maps())
    path, norm = SignatureState(state.tensors["point"], state.tensors["xi"], state.steps), slots.normaliser

    def signature() -> Any:
        return slots.signature.step(path, norm.state(raw))

    with torch.no_grad():
        _, xi, delta = signature()

    def update() -> Any:
        point = norm.state(raw)
        key = slots.keys(norm.xi(xi), norm.delta(delta), state.tensors.get("anchor"))
        rate = slots.write_rate(point - path.point, point, state.steps == 0)
        inputs = slots.slots.prepare(content, key, rate, maps)
        return inputs, slots.slots.write(state.tensors["slots"], inputs, maps)

    with torch.no_grad():
        inputs, written = update()
    cut = {
        "signature": signature,
        "slot update": update,
        "readout": lambda: slots.slots.read(written.slots, inputs),
    }
    return found | {name: exact(session.fused(part)) for name, part in cut.items()}


def encode(session: Any) -> Callable[[], Any]:
    """The pictures of one step."""
    shapes = [session.shapes[key] for key in session.policy.config.image_features]
    pictures = [torch.randn(rows, 1, *shape, device=session.device) for rows, *shape in shapes]
    return lambda: session.encode(pictures)


def long_run(policy: Any, given: Observations, watch: Stopwatch, what: str) -> dict[str, Any]:
    """The control loop for many steps: how long steps take where a new chunk is made and where not, and what changes."""
    session = policy.session
    held: list[float | None] = []
    finite, largest = True, 0.0

    def step(number: int) -> None:
        nonlocal finite, largest
        action = policy.select_action(given[number])
        if number % 1_000 == 0:
            held.append(resident())
            state = session.state
            carried = [] if state is None else [x.flatten() for x in state.tensors.values()]
            values = torch.cat([action.flatten(), *carried]).abs()
            finite, largest = finite and bool(values.isfinite().all()), max(largest, float(values.max()))

    policy.reset()
    times = watch.wall(what, step)
    begins = np.zeros(len(times), bool)
    interval = session.every  # control steps from one chunk to the next; the warm-up's count
    begins[(-WARM_UP) % interval :: interval] = True
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


def measure(
    kind: str,
    preset: str,
    memory: str | None,
    size: int,
    precision: str,
    watch: Stopwatch,
    *,
    base: bool,
    fuse: bool | None,
) -> dict[str, Any]:
    """All figures of one policy."""
    device, title = str(watch.device), f"{kind} {size} px"
    given = Observations(size, device)
    before = torch.cuda.memory_allocated() if watch.cuda else 0
    policy = make(kind, preset, memory, size, device)
    name, head = policy.config.memory.name, policy.memory_head
    found: dict[str, Any] = {"policy": kind, "memory": name, "size": size, "precision": precision}
    session = policy.compile_for_control(precision=precision, fuse=fuse)
    found |= {"error": session.error, "state_bytes": 0 if head is None else head.memory.state_bytes}
    if watch.cuda:
        torch.cuda.reset_peak_memory_stats()
    found["loop"] = long_run(policy, given, watch, f"{title}: control loop, memory {name}")
    if watch.cuda:
        found["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    cut = parts(session) if head is not None else {}
    found["parts"] = {name: vars(watch.part(f"{title}: {name}", part, precision)) for name, part in cut.items()}
    found["parts"]["encode"] = vars(watch.part(f"{title}: encode", encode(session), precision))
    policy.reset()
    found["total loop"] = vars(
        Timing.of(watch.wall(f"{title}: a chunk every step", lambda n: policy.predict_action_chunk(given[n]), PARTS))
    )
    if base:
        policy.use_eager()
        found["eager with memory"] = vars(
            Timing.of(watch.wall(f"{title}: eager", lambda n: policy.predict_action_chunk(given[n]), FEW))
        )
        del policy, session, cut, head
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
