"""`tracemem attach`: a trained stock ACT or Diffusion checkpoint becomes one with a memory that does nothing yet."""

import sys
from dataclasses import fields
from pathlib import Path

import tyro
from rich.console import Console

from trace_errors import CheckpointError


class AttachError(Exception):
    """The checkpoint cannot be used; nothing was written."""


def attached(checkpoint: Path, name: str, preset: str, slots: int | None) -> tuple:
    """The policy with a memory and its pipelines, from a stock checkpoint."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class
    from safetensors import SafetensorError

    import lerobot_policy_trace  # noqa: F401  (registers the configurations)
    from lerobot_policy_trace.configuration_trace import MemoryOptions
    from lerobot_policy_trace.loading import load_configuration, load_processors
    from lerobot_policy_trace.processor_trace import with_raw_state

    if not (checkpoint / "config.json").exists():
        raise AttachError(
            f"{checkpoint}: no config.json there, expected a folder like checkpoints/last/pretrained_model"
        )
    stock = load_configuration(checkpoint)
    if name == "none":
        raise AttachError("memory: got 'none', which is the policy you have")
    if stock.type not in {"act", "diffusion"}:
        raise AttachError(f"{checkpoint}: a policy of type {stock.type!r}, expected 'act' or 'diffusion'")
    kind = PreTrainedConfig.get_choice_class(f"trace_{stock.type}")
    memory = MemoryOptions(name=name, preset=preset, attach="residual", slots=slots)
    config = kind(**{f.name: getattr(stock, f.name) for f in fields(stock) if f.init}, memory=memory)
    try:
        trained = get_policy_class(stock.type).from_pretrained(checkpoint)
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{checkpoint}: model.safetensors is missing or not whole ({error})") from error
    policy = get_policy_class(config.type)(config)
    missing, unexpected = policy.load_state_dict(trained.state_dict(), strict=False)
    if unexpected or any(not key.startswith("recall.") for key in missing):
        raise AttachError(
            f"{checkpoint}: its weights do not fit ({len(unexpected)} unknown, e.g. {list(unexpected)[:1]})"
        )
    before, after = with_raw_state(load_processors(stock, checkpoint))
    return policy, before, after


def attach(
    checkpoint: tyro.conf.Positional[Path],
    out: Path,
    memory: str = "trace",
    preset: str = "default",
    slots: int | None = None,
) -> int:
    """Adds a memory to a trained stock ACT or Diffusion Policy. At first every action is what it was; then it can learn.

    Afterwards: lerobot-train --policy.path=OUT --dataset.repo_id=... trains memory and policy together, with the memory's
    own learning rates (--policy.memory.lr, --policy.memory.adapter_lr).

    Args:
        checkpoint: folder of the stock policy (the pretrained_model folder of a training).
        out: folder to write; must not exist.
        memory: which memory.
        preset: its size and form.
        slots: number of slots, if not the preset's.
    """
    if out.exists():
        print(f"tracemem attach: {out} exists already: choose another folder", file=sys.stderr)  # noqa: T201
        return 2
    try:
        policy, before, after = attached(checkpoint, memory, preset, slots)
    except (AttachError, ValueError) as error:
        print(f"tracemem attach: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code if isinstance(error, CheckpointError) else 2
    for part in (policy, before, after):
        part.save_pretrained(out)
    added = sum(p.numel() for p in policy.recall.parameters())
    Console().print(f"Wrote {out}: {policy.name}, {added:,} parameters added, every action as before", soft_wrap=True)
    return 0
