"""`tracemem attach`: a trained stock ACT or Diffusion checkpoint becomes one with a memory that changes no action yet."""

from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from trace_errors import UsageError
from trace_lab.recipe import known
from trace_memory.registry import METHODS


def attach(checkpoint: tyro.conf.Positional[Path], out: Path, memory: str = "trace") -> int:
    """Adds a memory to a trained stock ACT or Diffusion Policy. At first every action is what it was; then it can learn.

    Afterwards: lerobot-train --policy.path=OUT --dataset.repo_id=... trains memory and policy together, with the memory's
    own learning rate (--policy.memory.lr).

    Args:
        checkpoint: folder of the stock policy (the pretrained_model folder of a training).
        out: folder to write; must not exist.
        memory: which memory (tracemem params lists them).
    """
    if out.exists():
        raise UsageError(f"--out: {out} exists already: choose another folder")
    if memory == "none":
        raise UsageError("--memory: got 'none', which is the policy you have; expected a memory")
    known("--memory", memory, list(METHODS))
    if not (checkpoint / "config.json").exists():
        raise UsageError(
            f"{checkpoint}: no config.json there, expected a folder like checkpoints/last/pretrained_model"
        )
    from lerobot_policy_trace import MemoryOptions, TraceActPolicy, TraceDiffusionPolicy
    from lerobot_policy_trace.loading import load_policy, policy_type
    from lerobot_policy_trace.processor_trace import with_raw_state

    act = policy_type(checkpoint, expected=("act", "diffusion")) == "act"
    options = MemoryOptions(name=memory)
    stock, before, after = load_policy(checkpoint, "cpu")
    policy: Any = (TraceActPolicy if act else TraceDiffusionPolicy).from_stock(stock, memory=options)
    for part in (policy, *with_raw_state((before, after))):
        part.save_pretrained(out)
    added = sum(p.numel() for p in policy.parameters()) - sum(p.numel() for p in stock.parameters())
    Console().print(f"Wrote {out}: {policy.name}, {added:,} parameters added, every action as before", soft_wrap=True)
    return 0
