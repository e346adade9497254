"""Do keys stay finite and in range on an endless path? Streams a million steps of a moving 17-channel robot through
each kind of key, standardised by the statistics of short training episodes, and prints how far it strays.
`python benchmarks/keys.py [--steps 1000000]` (seconds on a GPU; on a CPU take 20,000 steps)
"""

import argparse
import math

import torch

from trace_memory.normalise import Normaliser
from trace_memory.signature import LogSignature, Signature

CHANNELS, EPISODE = 17, 400


def motion(steps: int, generator: torch.Generator) -> torch.Tensor:
    """Joint angles of a robot that keeps moving: smooth noise held within limits, and encoder noise."""
    knots = torch.randn(steps // 20 + 4, CHANNELS, generator=generator)
    smooth = torch.nn.functional.interpolate(knots.T[None], size=steps, mode="linear", align_corners=True)[0].T
    return torch.tanh(smooth) + 0.003 * torch.randn(steps, CHANNELS, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    episodes = [motion(EPISODE, torch.Generator().manual_seed(seed)) for seed in range(32)]
    kinds = {
        "signature": Signature(CHANNELS, 3),
        "log-signature": LogSignature(CHANNELS, 3),
        "signature, fade 8": Signature(CHANNELS, 3, 8.0),
        "signature, fade 32": Signature(CHANNELS, 3, 32.0),
        "signature, fade 128": Signature(CHANNELS, 3, 128.0),
    }
    print(f"{options.steps:,} steps, float32; standardised by {len(episodes)} episodes of {EPISODE} steps")
    print(
        f"{'key':<22}{'bound':>6}{'finite':>8}{'max |xi|':>12}{'max |delta|':>13}{'median |xi|':>13}{'end/start':>11}"
    )
    for name, signature in kinds.items():
        for bound in (math.inf, 10.0):
            normaliser = Normaliser(CHANNELS, signature.dim, bound).fit(episodes, signature).to(options.device)
            generator = torch.Generator().manual_seed(99)
            state = signature.init(1, device=options.device)
            finite, most, most_delta, medians = True, 0.0, 0.0, []
            path = normaliser.state(motion(options.steps, generator).to(options.device))
            for piece in path.split(options.chunk):
                state, xi, delta = signature.stream(piece[None], state=state)
                xi, delta = normaliser.xi(xi), normaliser.delta(delta)
                finite &= bool(torch.isfinite(xi).all() and torch.isfinite(delta).all())
                most, most_delta = max(most, float(xi.abs().max())), max(most_delta, float(delta.abs().max()))
                medians.append(float(xi[:, ::100].abs().median()))
            drift = medians[-1] / medians[0]
            print(
                f"{name:<22}{bound:>6.0f}{finite!s:>8}{most:>12.3g}{most_delta:>13.3g}{medians[-1]:>13.3g}{drift:>11.3g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
