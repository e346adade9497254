"""What a memory does during an episode: when each slot is written, how far its gate opens, what is read, and in which slot
counterfactual episodes differ. The expert does the same held-out episode once for each cue. Until the branch only the cue
differs, so any difference between the memories comes from it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_lab.dataset import play
from trace_lab.rollout import Episodes, PolicyRunner
from trace_lab.trained import configuration, find, pictures, runner

Heat = NDArray[np.float64]  # (slots, steps)


@dataclass(frozen=True)
class Inside:
    """One episode of the expert as a policy's memory took it in: step by step, slot by slot."""

    cue: str
    gone: int  # step at which the cue had disappeared
    branches: list[int]  # steps at which the lamps lit
    write: Heat
    gate: Heat
    read: Heat
    slots: NDArray[np.float64]  # (steps, slots, width)


def watch(policy: PolicyRunner, env: Any, seed: int, cue: int) -> Inside:
    """Shows the policy an episode of the expert and notes what its memory does."""
    import torch

    noted: dict[str, list[Any]] = {"write": [], "gate": [], "read": [], "slots": []}
    policy.reset()
    for observation, _ in play(env, seed, cue=cue):
        rows = {key: x[None] for key, x in observation.items() if key != "pixels"}
        rows["pixels"] = {camera: picture[None] for camera, picture in observation["pixels"].items()}
        with torch.inference_mode():
            policy.policy.observe(policy.before(policy.batch(rows)))
        readout = policy.policy.readout
        now = {
            "write": readout.routing.omega,
            "gate": readout.routing.beta,
            "read": readout.alpha,
            "slots": readout.slots,
        }
        for name, x in now.items():
            noted[name].append(x[0].double().cpu().numpy())
    heats = {name: np.stack(rows).T for name, rows in noted.items() if name != "slots"}
    record = env.record
    branches = [decision.frame for decision in record.decisions if decision.frame is not None]
    return Inside(env.bench.cues[cue], record.cue_gone or 0, branches, **heats, slots=np.stack(noted["slots"]))


def counterfactual(checkpoint: Path, task: str, seed: int, *, delay: int | None = None) -> list[Inside]:
    """A held-out episode, once for each cue, as a trained policy with slots sees it; empty for other memories."""
    folder, _ = find(checkpoint)
    config = configuration(folder, "cpu")
    if not hasattr(config, "memory") or config.memory.name != "trace":
        return []
    size, cameras = pictures(config)
    asked = Episodes(task, "heldout", "default", delay, None, None, seed, 1, size=size, cameras=cameras)
    env, policy = asked.make(), runner(folder, "cpu", 0)
    try:
        return [watch(policy, env, seed, cue) for cue in range(len(env.bench.cues))]
    finally:
        env.close()


def difference(pair: list[Inside]) -> Heat:
    """(slots, steps): how far apart the slots of two counterfactual episodes are, as a share of their size; up to the first
    branch.
    """
    end = min(min([each.write.shape[1], *each.branches]) for each in pair)
    first, second = (each.slots[:end] for each in pair[:2])
    apart = np.linalg.norm(first - second, axis=-1)
    size = (np.linalg.norm(first, axis=-1) + np.linalg.norm(second, axis=-1)) / 2
    share: Heat = (apart / np.maximum(size, 1e-9)).T
    return share


def most_different(pair: list[Inside]) -> tuple[int, float]:
    """The slot that differs most when the first branch comes, and by how much."""
    last = difference(pair)[:, -1]
    return int(last.argmax()), float(last.max())


def draw(pair: list[Inside], path: Path) -> None:
    """Heat maps: write weights, gates and read weights of each episode; then where they differ. Cue and branches marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(f"cue {each.cue}: {name}", heat, each) for each in pair for name, heat in _named(each)]
    rows.append(("difference of the slots, as a share of their size", difference(pair), pair[0]))
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
    return [("write weight (omega)", each.write), ("gate (beta)", each.gate), ("read weight (alpha)", each.read)]
