"""Is one version of the code slower than another? Updates on whole episodes and control steps of a small policy, in turns:
each run in a process of its own, on one core and one thread. Knows how version 0.1 and later ones are called.

    python benchmarks/old_and_new.py OLD NEW [--runs 10] [--policies act diffusion]

OLD and NEW are checkouts. Seconds are CPU time. A ratio is that of two runs that followed each other; below 1 the new one is
faster.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE, ACTION, SIZE = 17, 17, 64
EPISODES, LENGTH, TARGETS = 2, 96, 8
CAMERA = "observation.images.top"
ACT = {
    "dim_model": 128, "n_heads": 4, "dim_feedforward": 256, "n_encoder_layers": 2, "chunk_size": 40, "n_action_steps": 5,
    "use_vae": False,
}  # fmt: skip
DIFFUSION = {
    "horizon": 16, "n_action_steps": 5, "down_dims": (64, 128), "num_inference_steps": 5, "noise_scheduler_type": "DDIM",
    "crop_shape": None,
}  # fmt: skip


def policy(kind: str, period: int) -> Any:
    """A small policy with our memory, of whichever version this process has."""
    import torch
    from lerobot.configs import FeatureType, PolicyFeature

    from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
    from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy
    from lerobot_policy_trace.paths import Paths

    ours = {"period": period, "width": 64, "hidden": 64, "velocity_channels": [0, 1, 2]}
    if old():
        ours = {"update_every": period, "preset": "tiny", "anchor": True, "clock": "path", "rates": [0, 1, 2]}
    features = {
        "input_features": {
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
            CAMERA: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }
    torch.manual_seed(0)
    options, memory = ACT if kind == "act" else DIFFUSION, MemoryOptions(**ours)
    config, cls = {
        "act": (TraceActConfig, TraceActPolicy),
        "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy),
    }[kind]
    made = cls(config(memory=memory, **features, **options))
    states = torch.randn(EPISODES * LENGTH, STATE).cumsum(0) / 10
    ends = torch.arange(1, EPISODES + 1) * LENGTH
    made.paths = Paths(states, ends - LENGTH, ends)
    (made.recall if old() else made.memory_head).fit(made.paths)
    return made


def old() -> bool:
    """Whether this is version 0.1."""
    return importlib.util.find_spec("lerobot_policy_trace.episodes") is None


def batch(made: Any, period: int, *, encoded: bool) -> Any:
    """Whole episodes, every `period`-th frame written."""
    import torch

    config, states, starts = made.config, made.paths.states, made.paths.starts
    draw = torch.Generator().manual_seed(1)
    times = torch.randint(0, LENGTH, (EPISODES, TARGETS), generator=draw).sort(1).values
    written = starts[:, None] + torch.arange(0, LENGTH, period)
    past = torch.arange(1 - config.n_obs_steps, 1)
    seen = (starts[:, None, None] + (times[..., None] + past).clamp_min(0)).flatten(0, 1)
    rows, where = torch.cat([written.flatten(), seen.flatten()]).unique(return_inverse=True)
    frames = torch.randn(len(rows), 3, SIZE, SIZE, generator=draw)
    count, horizon = EPISODES * TARGETS, len(config.action_delta_indices)
    state = torch.randn(count, config.n_obs_steps, STATE, generator=draw)
    state = state[:, 0] if config.type == "trace_act" else state
    actions = torch.randn(count, horizon, ACTION, generator=draw)
    pad = torch.zeros(count, horizon, dtype=torch.bool)
    known = {
        "states": states[rows], "written": where[: written.numel()].view(written.shape), "path": states[written],
        "valid": torch.ones_like(written, dtype=torch.bool),
        "row": torch.arange(EPISODES).repeat_interleave(TARGETS), "time": times.flatten() // period,
    }  # fmt: skip
    places = where[written.numel() :].view(seen.shape)
    if encoded:
        with torch.no_grad():
            frames = (made._encode if old() else made.encode)([frames])[0]
    if old():
        from lerobot_policy_trace.learning import EPISODES as KEY
        from lerobot_policy_trace.learning import Episodes

        made.backbone_frozen = encoded
        whole = Episodes(pictures=[frames], seen=places, **known)
        return {"observation.state": state, "action": actions, "action_is_pad": pad, KEY: whole}
    from lerobot_policy_trace.episodes import EpisodeBatch, MemoryInputs

    memory = MemoryInputs(**known)
    return EpisodeBatch((frames,), encoded, places, {"observation.state": state}, actions, pad, memory)


def timed(call: Callable[[], Any], count: int, warm: int) -> float:
    """CPU seconds of a call."""
    for _ in range(warm):
        call()
    begun = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begun) / count


def updates(kind: str, period: int, count: int, *, encoded: bool) -> float:
    """Seconds of an update, as `tracemem train` makes it once the batch is there."""
    import torch

    made = policy(kind, period)
    made.train()
    if encoded:
        for backbone in made.backbones:
            backbone.requires_grad_(requires_grad=False)
    else:
        import lerobot_policy_trace

        place = Path(lerobot_policy_trace.__file__).parent / "backbone.py"
        if place.exists():
            from lerobot_policy_trace.backbone import quicken as arrange
        else:
            from lerobot_policy_trace.encoder import to_channels_last as arrange
        for backbone in made.backbones:
            arrange(backbone)
    optimizer = made.config.get_optimizer_preset().build(made.get_optim_params())
    given = batch(made, period, encoded=encoded)

    def update() -> None:
        optimizer.zero_grad()
        if old():
            given["episodes"].state = None  # version 0.1 writes to its batch
        made(given)[0].backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 10.0)
        optimizer.step()

    return timed(update, count, 1)


def steps(kind: str, count: int, *, compiled: bool) -> float:
    """Seconds of a control step, chunks of actions included."""
    import torch

    made = policy(kind, 1).eval()
    if compiled:
        made.compile_for_control()
    shapes = {"observation.state": (STATE,), "observation.raw_state": (STATE,), CAMERA: (3, SIZE, SIZE)}
    draw = torch.Generator().manual_seed(2)
    given = {name: torch.randn(1, *shape, generator=draw) for name, shape in shapes.items()}
    made.reset()
    return timed(lambda: made.select_action(given), count, 10)


def child(asked: argparse.Namespace) -> None:
    """One run of one version; prints its seconds."""
    import torch

    import lerobot_policy_trace

    if not Path(lerobot_policy_trace.__file__).is_relative_to(asked.old.resolve()):
        sys.exit(f"{lerobot_policy_trace.__file__} was imported, expected {asked.old}'s")
    torch.set_num_threads(1)
    found = {}
    for kind in asked.policies:
        found[f"{kind}: update"] = updates(kind, 4, asked.updates, encoded=False)
        found[f"{kind}: update, encoder frozen"] = updates(kind, 1, 2 * asked.updates, encoded=True)
        found[f"{kind}: control step, eager"] = steps(kind, asked.steps, compiled=False)
        found[f"{kind}: control step, compiled"] = steps(kind, asked.steps, compiled=True)
    print(json.dumps(found))


def run(folder: Path, asked: argparse.Namespace, core: int) -> dict[str, float]:
    """A run of a version, in a process of its own."""
    settings = os.environ | {
        "PYTHONPATH": str(folder.resolve() / "src"),
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    words = ["--policies", *asked.policies, "--updates", str(asked.updates), "--steps", str(asked.steps)]
    made = subprocess.run(
        [sys.executable, __file__, str(folder), str(folder), "--child", *words],
        env=settings, capture_output=True, text=True, check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    if made.returncode:
        sys.exit(f"{folder}:\n{made.stderr[-3000:]}")
    found: dict[str, float] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs both in turns, and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=["act", "diffusion"], choices=["act", "diffusion"])
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked)
        return
    core = max(os.sched_getaffinity(0))
    both: list[list[dict[str, float]]] = [[], []]
    for number in range(asked.runs):
        order = [0, 1] if number % 2 == 0 else [1, 0]  # each goes first as often
        for which in order:
            both[which].append(run((asked.old, asked.new)[which], asked, core))
        print(f"run {number + 1} of {asked.runs}", file=sys.stderr)
    print(f"{'':<36}{'old, ms':>10}{'new, ms':>10}{'ratio':>8}   {'quartiles':<14}{'all'}")
    for name in both[0][0]:
        first, second = ([found[name] for found in each] for each in both)
        ratios = sorted(b / a for a, b in zip(first, second, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        old_ms, new_ms = 1e3 * statistics.median(first), 1e3 * statistics.median(second)
        spread = f"{low:.2f} to {high:.2f}"
        print(
            f"{name:<36}{old_ms:>10.2f}{new_ms:>10.2f}{middle:>8.3f}   {spread:<14}{ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
