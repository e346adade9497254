"""A memory by itself. It sees a colour at the start of an episode, moves on, and is asked for the colour at the end.
First it learns from whole episodes; then it is used step by step, as on a robot.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from trace_memory import MemoryConfig, build, load_memory, save_memory

COLOURS, STEPS, CHANNELS, CONTENT = 3, 32, 4, 8


def episodes(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is seen (count, STEPS, CONTENT), the robot's path (count, STEPS, CHANNELS), and the colours."""
    colours = torch.randint(COLOURS, (count,))
    seen = 0.3 * torch.randn(count, STEPS, CONTENT)
    seen[:, :3, :COLOURS] += 3 * one_hot(colours, COLOURS)[:, None]  # in sight for three steps
    return seen, 0.1 * torch.randn(count, STEPS, CHANNELS).cumsum(1), colours


def main(updates: int = 100, folder: str = "outputs/memory") -> float:
    """Trains, saves, loads, and plays 200 new episodes; returns the share of right answers."""
    torch.manual_seed(0)
    config = MemoryConfig(channels=CHANNELS, content=CONTENT, width=32, hidden=32)
    memory = build(config)
    memory.normaliser.fit(list(episodes(64)[1]), memory.signature)  # the range of keys
    answer = nn.Linear(32, COLOURS)
    optimiser = torch.optim.Adam([*memory.parameters(), *answer.parameters()], lr=3e-3)
    for update in range(updates):
        seen, path, colours = episodes(32)
        _, readouts = memory.scan(seen, path)  # readouts.z is (32, STEPS, 32)
        loss = cross_entropy(answer(readouts.z[:, -1]), colours)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if update % 20 == 0:
            print(f"update {update}: loss {loss.item():.3f}")

    save_memory(Path(folder), memory, config)
    memory = load_memory(Path(folder))[0].eval()
    seen, path, colours = episodes(200)
    state = memory.init(batch=200)
    with torch.no_grad():
        for t in range(STEPS):  # nothing of the past is kept but the state
            state, readout = memory.step(state, seen[:, t], path[:, t])
        right = (answer(readout.z).argmax(-1) == colours).float().mean().item()
    print(f"right answers: {right:.0%}")
    return right


if __name__ == "__main__":
    main()
