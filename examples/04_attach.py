"""A memory for an ACT that is trained already. On day zero it changes no bit of any action; then both are trained together,
by `lerobot-train --policy.path=OUT ...` or as in example 03. `tracemem attach` is this, as a command.
"""

import sys

import torch

from lerobot_policy_trace import MemoryOptions, TraceActPolicy, load_policy, with_raw_state


def main(
    stock: str = "outputs/act/checkpoints/last/pretrained_model", out: str = "outputs/act_with_memory", steps: int = 20
) -> bool:
    """Attaches a memory to the policy in the folder `stock`; returns whether all actions are the same."""
    act, *processors = load_policy(stock)  # what LeRobot's loader would run unasked is refused
    policy = TraceActPolicy.from_stock(act, memory=MemoryOptions(width=256, hidden=256, attach="residual")).eval()
    before, after = with_raw_state(processors)  # the memory is addressed by raw states, whatever the policy normalises

    act.reset()
    policy.reset()
    same = True
    for _ in range(steps):
        observation = {name: torch.rand(1, *each.shape) for name, each in act.config.input_features.items()}
        old = act.select_action(processors[0](observation))
        new = policy.select_action(before(observation))
        same = same and torch.equal(old, new)
    added = sum(p.numel() for p in policy.memory_head.parameters())
    print(f"{added:,} parameters added; {'every action is' if same else 'actions are not'} the same, to the bit")

    for part in (policy, before, after):
        part.save_pretrained(out)
    return same


if __name__ == "__main__":
    main(*sys.argv[1:3])
