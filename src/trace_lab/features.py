"""Pictures encoded once, before a training that leaves the encoder as it is: what remains to be computed in an update is
small enough for two CPU cores. An encoder without pretrained weights is first fitted to the statistics of the pictures.
Runs that share a cache and an encoder share the feature maps.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.constants import OBS_STATE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lerobot_policy_trace.backbone import calibrate, quicken
from trace_lab.batches import Augment, generator
from trace_lab.frames import FramesError, FrameStore, fingerprint, held, memory
from trace_lab.policy import COUNTER
from trace_lab.recipe import Recipe, RecipeError

AT_ONCE = 128  # frames
SAMPLE, PIXELS = 256, 4_000_000  # frames that the encoder is fitted to, and how many pixels they may have in all
ROOM = 0.5  # share of the free memory that feature maps may take
WAY = ("vision_backbone", "resize_shape", "crop_shape", "replace_final_stride_with_dilation")  # from picture to map
LOOKS = 3  # with jitter or shift: as often each episode is encoded, the first time as it is


@dataclass
class Features:
    """Feature maps of every frame of a store."""

    maps: dict[str, Tensor]  # camera -> (looks, N, C, h, w); on a GPU in half precision

    def __call__(self, camera: str, rows: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """Maps by row, (..., C, h, w), of one look for each of (N,) owners; the same draw gives the same looks."""
        kept = self.maps[camera]
        kinds, of = owner.cpu().unique(return_inverse=True)
        look = torch.randint(len(kept), (len(kinds),), generator=draw)[of].to(rows.device, non_blocking=True)
        return kept[look.view(-1, *[1] * (rows.ndim - 1)), rows].float()


@dataclass
class Encoding:
    """All frames of a store through a policy's encoder."""

    policy: Any
    store: FrameStore
    prepare: Any
    made: Recipe
    console: Console

    def pictures(self, rows: Tensor, look: int = 0) -> list[Tensor]:
        """Frames as the encoder gets them, one tensor a camera; all looks but the first are augmented."""
        store = self.store
        augment = Augment(self.made.shift, self.made.jitter) if look else Augment(0, 0.0)
        owner = torch.searchsorted(store.ends, rows, right=True)
        batch: dict[str, Any] = {OBS_STATE: store.columns[OBS_STATE][rows]}
        for number, camera in enumerate(store.cameras):
            seen = []
            for episode in owner.unique().tolist():  # what an episode looks like does not depend on its neighbours here
                draw = generator(look, number, episode, 5)
                mine = rows[owner == episode]
                seen.append(augment(store.pictures(camera, mine), owner[owner == episode], draw))
            batch[camera] = torch.cat(seen)
        batch = self.prepare(batch)
        return [batch[camera] for camera in store.cameras]

    def fit(self) -> None:
        """Gives an encoder that has learnt nothing the statistics of some of the pictures."""
        store = self.store
        count, pixels = int(store.ends[-1]), sum(kept.shape[-2] * kept.shape[-1] for kept in store.cameras.values())
        few = max(1, min(SAMPLE, count, PIXELS // pixels))
        sample = self.pictures(torch.linspace(0, count - 1, few, device=store.device).long())
        if len({x.shape for x in sample}) > 1:
            sizes = ", ".join(
                f"{camera} {tuple(x.shape[-2:])}" for camera, x in zip(store.cameras, sample, strict=True)
            )
            raise RecipeError(
                f"backbone: frozen, but cameras have different sizes ({sizes}); take some with cameras=..."
            )
        for backbone in self.policy.backbones:
            calibrate(backbone, torch.cat(sample))

    @property
    def looks(self) -> int:
        """How often each episode is encoded."""
        return LOOKS if self.made.shift or self.made.jitter else 1

    @property
    def digest(self) -> str:
        """Of all that the maps depend on."""
        found = hashlib.sha256()
        for backbone in self.policy.backbones:
            for name, x in backbone.state_dict().items():  # the same layers in the same order, whatever they are called
                if not name.endswith(COUNTER):
                    found.update(x.detach().cpu().contiguous().numpy().tobytes())
        config = self.policy.config
        way = {name: getattr(config, name, None) or None for name in WAY}
        way |= {"normalisation": str(config.normalization_mapping.get("VISUAL"))}
        rest = [fingerprint(Path(self.store.meta.root)), list(self.store.cameras), self.store.device.type, self.looks]
        found.update(json.dumps([*rest, self.made.shift, self.made.jitter, way], sort_keys=True).encode())
        return found.hexdigest()[:24]

    def check(self, needed: int) -> None:
        """Refuses maps of so many bytes if there is no room for them."""
        device, count = self.store.device, int(self.store.ends[-1])
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory()
        if needed > ROOM * free:
            raise FramesError(
                f"backbone: frozen needs {needed / 1e9:.1f} GB for the feature maps of {count} frames, {self.looks} looks "
                f"each; {free / 1e9:.1f} GB are there. Fewer cameras, no jitter, or smaller pictures"
            )

    def maps(self) -> dict[str, Tensor]:
        """Maps of all looks at all frames."""
        store, looks, count = self.store, self.looks, int(self.store.ends[-1])
        kind = torch.float16 if store.device.type == "cuda" else torch.float32
        one = self.policy._encode(self.pictures(torch.zeros(1, dtype=torch.int64, device=store.device)))
        self.check(sum(x.numel() for x in one) * kind.itemsize * looks * count)
        maps: dict[str, Tensor] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task("encoding frames, once", total=looks * count)
            for look in range(looks):
                for rows in torch.arange(count, device=store.device).split(AT_ONCE):
                    found = self.policy._encode(self.pictures(rows, look))
                    for camera, x in zip(store.cameras, found, strict=True):
                        into = maps.setdefault(camera, x.new_empty(looks, count, *x.shape[1:], dtype=kind))
                        into[look, rows] = x.to(kind)
                    progress.advance(bar, len(rows))
        return maps


@torch.no_grad()
def encode(
    policy: Any,
    store: FrameStore,
    prepare: Any,
    made: Recipe,
    console: Console,
    *,
    learnt: bool,
    cache: Path | None = None,
) -> Features:
    """Freezes the policy's encoder, fits it to the pictures if it has learnt nothing yet, and uses it on all of them, or
    takes the maps that another run has left in the cache.
    """
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
    encoding = Encoding(policy, store, prepare, made, console)
    if not learnt:
        encoding.fit()
    for backbone in policy.backbones:
        quicken(backbone)
    if cache is None:
        return Features(encoding.maps())
    with held(cache / "features"):  # whoever comes second waits, and need not do it again
        kept = cache / "features" / f"{encoding.digest}.safetensors"
        if not kept.exists():
            maps, new = encoding.maps(), kept.with_suffix(".tmp")
            try:
                save_file(maps, new)
            except (OSError, SafetensorError) as error:
                new.unlink(missing_ok=True)
                raise FramesError(f"{kept}: feature maps could not be written ({error}). Make room there") from error
            new.replace(kept)
            return Features(maps)
    encoding.check(kept.stat().st_size)
    try:
        return Features(load_file(kept, device=str(store.device)))
    except SafetensorError as error:
        raise FramesError(f"{kept}: cannot be read ({error}). Remove it, and it is made anew") from error
