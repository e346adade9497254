"""What a control step costs, policy by policy and part by part, and whether it stays so over many steps. The table and the
command are in `profile`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.utils.constants import ACTION, OBS_STATE

from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.control import Control
from lerobot_policy_trace.frozen import exactly
from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy
from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_lab.recipe import PRESETS
from trace_lab.stopwatch import PARTS, WARM_UP, Stopwatch, Timing, resident
from trace_memory.memory import MemoryState, TraceMemory
from trace_memory.signature import SignatureState

CHANNELS = 17
CAMERAS = ("overhead", "left_wrist", "right_wrist")
FEW = 200  # times what no claim rests on is measured
POOL, PATH = 32, 4_096  # different pictures and robot states a run goes through, again and again


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
    if type(memory) is TraceMemory:
        path = SignatureState(state.cells["point"], state.cells["xi"], state.steps)
        slots = memory.slots

        def signature() -> Any:
            return memory.signature.step(path, memory.normaliser.state(raw))

        with torch.no_grad():
            _, xi, delta = signature()

        def update() -> Any:
            anchor = state.cells.get("anchor")
            key = memory.keys(memory.normaliser.xi(xi), memory.normaliser.delta(delta), anchor)
            point = memory.normaliser.state(raw)
            pace = memory.pace(point - path.point, point, state.steps == 0)
            drive = slots.prepare(content, key, pace, slots.maps())
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
