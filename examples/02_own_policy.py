"""A memory in a policy of one's own: an encoder, a memory and an action head. Training scans whole episodes; control takes
one step at a time and carries the memory's state along. Both give the same actions.
"""

import torch
from torch import Tensor, nn

from trace_memory import MemoryConfig, MemoryState, build


class Policy(nn.Module):
    """Behaviour cloning with a memory."""

    def __init__(self, channels: int, actions: int, width: int = 64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.memory = build(MemoryConfig(channels=channels, content=128, width=width, hidden=width))
        self.head = nn.Sequential(nn.Linear(128 + channels + width, 128), nn.ReLU(), nn.Linear(128, actions))

    def forward(self, images: Tensor, states: Tensor) -> Tensor:
        """Actions (B, T, a) of whole episodes: images (B, T, 3, H, W), raw robot states (B, T, d)."""
        seen = self.encoder(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        _, readout = self.memory.scan(seen, states)
        return self.head(torch.cat([seen, states, readout.z], dim=-1))

    def act(self, memory: MemoryState, image: Tensor, state: Tensor) -> tuple[MemoryState, Tensor]:
        """One control step: image (B, 3, H, W), state (B, d)."""
        seen = self.encoder(image)
        memory, readout = self.memory.step(memory, seen, state)
        return memory, self.head(torch.cat([seen, state, readout.z], dim=-1))


def main(updates: int = 20) -> float:
    """Trains on random demonstrations; returns the largest difference between training's and control's actions."""
    torch.manual_seed(0)
    images, states = torch.rand(4, 40, 3, 32, 32), 0.1 * torch.randn(4, 40, 6).cumsum(1)
    policy = Policy(channels=6, actions=6)
    policy.memory.normaliser.fit(list(states), policy.memory.signature)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for _ in range(updates):
        optimiser.zero_grad()
        loss = (policy(images, states) - states.roll(-1, dims=1)).abs().mean()
        loss.backward()
        optimiser.step()
    policy.eval()
    with torch.no_grad():
        wanted, memory, made = policy(images, states), policy.memory.init(batch=4), []
        for t in range(40):
            memory, action = policy.act(memory, images[:, t], states[:, t])
            made.append(action)
    difference = (torch.stack(made, dim=1) - wanted).abs().max().item()
    print(f"loss {loss.item():.3f}; control differs from training by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
