"""Pictures encoded once, before a training that leaves the encoder as it is: what remains to be computed in an update is
small enough for two CPU cores. An encoder without pretrained weights is first fitted to the statistics of the pictures.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lerobot.utils.constants import OBS_STATE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lerobot_policy_trace.backbone import calibrate, quicken
from trace_lab.batches import Augment, generator
from trace_lab.frames import FramesError, FrameStore, memory
from trace_lab.recipe import Recipe, RecipeError

AT_ONCE = 128  # frames
SAMPLE, PIXELS = 256, 4_000_000  # frames that the encoder is fitted to, and how many pixels they may have in all
ROOM = 0.5  # share of the free memory that feature maps may take
LOOKS = 3  # with jitter or shift: as often each episode is encoded, the first time as it is


@dataclass
class Features:
    """Feature maps of every frame of a store."""

    maps: dict[str, Tensor]  # camera -> (looks, N, C, h, w)

    def __call__(self, camera: str, rows: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """Maps by row, (..., C, h, w), of one look for each of (N,) owners; the same draw gives the same looks."""
        kept = self.maps[camera]
        kinds, of = owner.unique(return_inverse=True)
        look = torch.randint(len(kept), (len(kinds),), generator=draw).to(rows.device)[of]
        return kept[look.view(-1, *[1] * (rows.ndim - 1)), rows]


@torch.no_grad()
def encode(
    policy: Any, store: FrameStore, prepare: Any, made: Recipe, seed: int, console: Console, *, learnt: bool
) -> Features:
    """Freezes the policy's encoder, fits it to the pictures if it has learnt nothing yet, and uses it on all of them."""
    if not policy.backbones:
        raise RecipeError("backbone: got frozen, but the policy has no pictures")
    if getattr(policy.config, "crop_shape", None) is not None and policy.config.crop_is_random:
        raise RecipeError(
            f"backbone: got frozen, but pictures are cropped anew each time (policy.crop_shape={policy.config.crop_shape}); "
            "expected policy.crop_shape=null, or policy.crop_is_random=false"
        )
    policy.backbone_frozen = True
    for backbone in policy.backbones:
        backbone.eval().requires_grad_(requires_grad=False)

    def pictures(rows: Tensor, augment: Augment, look: int) -> list[Tensor]:
        owner = torch.searchsorted(store.ends, rows, right=True)
        batch: dict[str, Any] = {OBS_STATE: store.columns[OBS_STATE][rows]}
        for number, camera in enumerate(store.cameras):
            seen = []
            for episode in owner.unique().tolist():  # what an episode looks like does not depend on its neighbours here
                draw = generator(seed, look, number, episode, 5)
                mine = rows[owner == episode]
                seen.append(augment(store.pictures(camera, mine), owner[owner == episode], draw))
            batch[camera] = torch.cat(seen)
        batch = prepare(batch)
        return [batch[camera] for camera in store.cameras]

    plain, changed = Augment(0, 0.0), Augment(made.shift, made.jitter)
    count = int(store.ends[-1])
    if not learnt:
        pixels = sum(kept.shape[-2] * kept.shape[-1] for kept in store.cameras.values())
        few = max(1, min(SAMPLE, count, PIXELS // pixels))
        sample = pictures(torch.linspace(0, count - 1, few, device=store.device).long(), plain, 0)
        if len({x.shape for x in sample}) > 1:
            sizes = ", ".join(
                f"{camera} {tuple(x.shape[-2:])}" for camera, x in zip(store.cameras, sample, strict=True)
            )
            raise RecipeError(
                f"backbone: frozen, but cameras have different sizes ({sizes}); take some with cameras=..."
            )
        for backbone in policy.backbones:
            calibrate(backbone, torch.cat(sample))
    for backbone in policy.backbones:
        quicken(backbone)
    looks = LOOKS if made.shift or made.jitter else 1
    one = policy._encode(pictures(torch.zeros(1, dtype=torch.int64, device=store.device), plain, 0))
    needed = sum(x.numel() * x.element_size() for x in one) * looks * count
    free = torch.cuda.mem_get_info(store.device)[0] if store.device.type == "cuda" else memory()
    if needed > ROOM * free:
        raise FramesError(
            f"backbone: frozen needs {needed / 1e9:.1f} GB for the feature maps of {count} frames, {looks} looks each; "
            f"{free / 1e9:.1f} GB are there. Fewer cameras, no jitter, or smaller pictures"
        )
    maps: dict[str, Tensor] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("encoding frames, once", total=looks * count)
        for look in range(looks):
            for rows in torch.arange(count, device=store.device).split(AT_ONCE):
                found = policy._encode(pictures(rows, changed if look else plain, look))
                for camera, x in zip(store.cameras, found, strict=True):
                    into = maps.setdefault(camera, x.new_empty(looks, count, *x.shape[1:]))
                    into[look, rows] = x
                progress.advance(bar, len(rows))
    return Features(maps)
