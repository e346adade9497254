"""Do keys stay finite and in range on an endless path? Streams a million steps of a moving 17-channel robot through
each kind of key, standardised by the statistics of short training episodes, and prints how far it strays.
`python benchmarks/keys.py [--steps 1000000]` (a minute or two a row)
"""

import argparse

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
    parser.add_argument("--chunk", type=int, default=64, help="steps at once; 64 suits a CPU's cache, 1000 a GPU")
    parser.add_argument("--only", default="", help="only keys whose name contains this")
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
    print("| key | finite | max abs xi | max abs delta | median abs xi, training | median abs xi, at the end |")
    print("|---|---|---|---|---|---|")
    for name, signature in kinds.items():
        if options.only not in name:
            continue
        normaliser = Normaliser(CHANNELS, signature.dim).fit(episodes, signature).to(options.device)
        bounded = Normaliser(CHANNELS, signature.dim, bound=10.0).to(options.device)  # of keys already standardised
        training = torch.cat([_xi(normaliser, signature, e.to(options.device)) for e in episodes])
        state = signature.init(1, device=options.device)
        rows = {name: [True, 0.0, 0.0, training], f"{name}, soft bound 10": [True, 0.0, 0.0, bounded.xi(training)]}
        path = normaliser.state(motion(options.steps, torch.Generator().manual_seed(99)).to(options.device))
        for piece in path.split(options.chunk):
            state, xi, delta = signature.stream(piece[None], state=state)
            xi, delta = normaliser.xi(xi), normaliser.delta(delta)
            for row, (x, d) in zip(rows.values(), ((xi, delta), (bounded.xi(xi), bounded.delta(delta))), strict=True):
                row[0] &= bool(torch.isfinite(x).all() and torch.isfinite(d).all())
                row[1], row[2] = max(row[1], float(x.abs().max())), max(row[2], float(d.abs().max()))
                row[4:] = [x]
        for label, (finite, most, most_delta, trained, last) in rows.items():
            medians = [float(x.abs().median()) for x in (trained, last)]
            print(
                f"| {label} | {finite} | {most:.3g} | {most_delta:.3g} | {medians[0]:.2f} | {medians[1]:.2f} |",
                flush=True,
            )


def _xi(normaliser: Normaliser, signature: Signature, path: torch.Tensor) -> torch.Tensor:
    return normaliser.xi(signature.stream(normaliser.state(path)[None])[1])[0, ::20]


if __name__ == "__main__":
    main()
