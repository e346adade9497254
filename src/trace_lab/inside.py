"""What a memory does during an episode: when each slot is written, how far its gate opens, what is read, and which slot
holds the cue. The expert does the same episode once for each cue (twins); until the branch nothing but the cue differs, so
whatever differs between the memories of twins is what they know of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_bench.env import make
from trace_lab.dataset import play
from trace_lab.evaluate import configuration, eyes, find, pilot
from trace_lab.rollout import Pilot

Heat = NDArray[np.float64]  # (slots, steps)


@dataclass
class Inside:
    """One episode of the expert, watched by a policy: step by step, slot by slot."""

    cue: str
    gone: int  # step at which the cue had disappeared
    branches: list[int]  # steps at which the lamps lit
    write: Heat
    gate: Heat
    read: Heat
    slots: NDArray[np.float64]  # (steps, slots, width)


def watch(crew: Pilot, env: Any, seed: int, cue: int) -> Inside:
    """Shows the policy an episode of the expert and notes what its memory does."""
    import torch

    seen: dict[str, list[Any]] = {"write": [], "gate": [], "read": [], "slots": []}
    crew.reset()
    for observation, _ in play(env, seed, cue=cue):
        rows = {key: x[None] for key, x in observation.items() if key != "pixels"}
        rows["pixels"] = {camera: picture[None] for camera, picture in observation["pixels"].items()}
        with torch.inference_mode():
            crew.policy.observe(crew.before(crew.batch(rows)))
        said = crew.policy.readout
        found = {"write": said.routing.omega, "gate": said.routing.beta, "read": said.alpha, "slots": said.slots}
        for name, x in found.items():
            seen[name].append(x[0].double().cpu().numpy())
    heats = {name: np.stack(rows).T for name, rows in seen.items() if name != "slots"}
    record = env.record
    frames = [decision.frame for decision in record.decisions if decision.frame is not None]
    return Inside(env.bench.cues[cue], record.cue_gone or 0, frames, **heats, slots=np.stack(seen["slots"]))


def twins(checkpoint: Path, task: str, seed: int, **options: Any) -> list[Inside]:
    """The same held-out episode, once for each cue, as a trained policy with slots sees it; empty for other memories."""
    folder, _ = find(checkpoint)
    config = configuration(folder, "cpu")
    if not hasattr(config, "memory") or config.memory.name != "trace":
        return []
    size, cameras = eyes(config, None)
    env = make(task, split="heldout", size=size, cameras=cameras, **options)
    crew = pilot(folder, config, 0)
    try:
        return [watch(crew, env, seed, cue) for cue in range(len(env.bench.cues))]
    finally:
        env.close()


def difference(pair: list[Inside]) -> Heat:
    """(slots, steps): how far apart the slots of twins are, as a share of their size; up to the first branch."""
    end = min(min([each.write.shape[1], *each.branches]) for each in pair)
    first, second = (each.slots[:end] for each in pair[:2])
    apart = np.linalg.norm(first - second, axis=-1)
    size = (np.linalg.norm(first, axis=-1) + np.linalg.norm(second, axis=-1)) / 2
    return (apart / np.maximum(size, 1e-9)).T


def holder(pair: list[Inside]) -> tuple[int, float]:
    """The slot in which twins differ most when the first branch comes, and by how much."""
    last = difference(pair)[:, -1]
    return int(last.argmax()), float(last.max())


def draw(pair: list[Inside], path: Path) -> None:
    """Heat maps: for each twin writes, gates and reads; then where they differ. Cue and branches are marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(f"{each.cue}: {name}", heat, each) for each in pair for name, heat in _named(each)]
    rows.append(("where they differ", difference(pair), pair[0]))
    longest = max(each.write.shape[1] for each in pair)
    figure, axes = plt.subplots(len(rows), 1, figsize=(9, 1.05 * len(rows)), sharex=True, layout="constrained")
    for axis, (name, heat, each) in zip(axes, rows, strict=True):
        shown = axis.imshow(heat, aspect="auto", cmap="magma", vmin=0, interpolation="nearest", origin="lower")
        axis.axvspan(-0.5, each.gone - 0.5, color="#4da3ff", alpha=0.25)
        for branch in each.branches:
            axis.axvline(branch, color="#35d07f", linewidth=1.5)
        axis.set_ylabel("slot", fontsize=7)
        axis.set_title(name, fontsize=8, loc="left")
        axis.set_yticks(range(len(heat)))
        axis.tick_params(labelsize=6)
        axis.set_xlim(-0.5, longest - 0.5)
        figure.colorbar(shown, ax=axis, fraction=0.02).ax.tick_params(labelsize=6)
    axes[-1].set_xlabel("control step (blue: the cue is in sight; green: the lamp lights)", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _named(each: Inside) -> list[tuple[str, Heat]]:
    return [("written to (omega)", each.write), ("gate (beta)", each.gate), ("read (alpha)", each.read)]
