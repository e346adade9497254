"""Weights that need not be stored. An encoder that was drawn at random and never trained, as `make demo`'s, is most of a
checkpoint and all of it follows from a seed: a lean checkpoint has the seed in its place, and a few numbers of each weight
left out, by which one sees that the same was drawn again.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SEED = "drawn_from_seed"  # in the file's metadata
SHOWN = "drawn."  # before the name of a weight that was left out
FEW = 8  # numbers of such a weight that stay


class DrawnError(RuntimeError):
    """What was left out of a checkpoint cannot be drawn again."""


def draw(policy: Any, seed: int) -> dict[str, Tensor]:
    """The weights with which a policy of this configuration begins, when its training has this seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        weights: dict[str, Tensor] = type(policy)(policy.config).state_dict()
    return weights


def few(x: Tensor) -> Tensor:
    """Some of its numbers, from the first to the last."""
    flat = x.detach().cpu().contiguous().flatten()
    return flat[torch.linspace(0, len(flat) - 1, FEW).long()]


def leave_out(policy: Any, seed: int, file: Path) -> int:
    """Writes a policy's weights without those that are what the seed draws; returns how many numbers need not be stored."""
    begun, kept, left = draw(policy, seed), dict[str, Tensor](), 0
    for name, x in policy.state_dict().items():
        x = x.detach().cpu().contiguous()
        drawn = x.numel() > FEW and torch.equal(x, begun[name])
        kept |= {f"{SHOWN}{name}": few(x)} if drawn else {name: x}
        left += x.numel() if drawn else 0
    save_file(kept, file, {SEED: str(seed), "format": "pt"})
    return left


def is_lean(file: str | Path) -> bool:
    """Whether a file of weights has some left out."""
    with safe_open(file, "pt") as content:
        return SEED in (content.metadata() or {})


def put_back(policy: Any, file: str | Path) -> None:
    """Gives a policy the weights of a lean file, with those left out drawn again. Another version of PyTorch may draw
    others: then a DrawnError, and the policy is as it was.
    """
    with safe_open(file, "pt") as content:
        seed = int(content.metadata()[SEED])
    stored = load_file(file)
    shown = {name.removeprefix(SHOWN): stored.pop(name) for name in list(stored) if name.startswith(SHOWN)}
    begun = draw(policy, seed) if shown else {}
    for name, x in shown.items():
        if name not in begun or not torch.allclose(few(begun[name]), x, atol=1e-6):
            raise DrawnError(
                f"{file}: {name} was left out because seed {seed} draws it, but PyTorch {torch.__version__} draws other "
                "numbers here. Train the policy anew: the run.json beside it has the recipe"
            )
    policy.load_state_dict(stored | {name: begun[name] for name in shown})
