"""Pictures encoded once, before a training that leaves the encoder as it is: what remains to be computed in an update is
small enough for two CPU cores. An encoder without pretrained weights is first fitted to the statistics of the pictures.
Runs that share a cache and an encoder share the feature maps.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.constants import OBS_STATE
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lerobot_policy_trace.encoder import calibrate, to_channels_last
from trace_errors import DatasetError, UsageError
from trace_lab.frames import FrameStore, held, ram
from trace_lab.progress import progress
from trace_lab.recipe import Recipe
from trace_lab.sampling import Jitter, generator
from trace_lab.source import fingerprint

AT_ONCE = 128  # frames
SAMPLE, PIXELS = 256, 4_000_000  # frames that the encoder is fitted to, and how many pixels they may have in all
COUNTER = "num_batches_tracked"  # of normalisations that learn: of no use to an encoder that does not
ROOM = 0.5  # share of the free memory that feature maps may take
WAY = ("vision_backbone", "resize_shape", "crop_shape", "replace_final_stride_with_dilation")  # from picture to map
VARIANTS = 3  # with jitter: as often each episode is encoded, the first time as it is


@dataclass(frozen=True)
class FeatureMaps:
    """Feature maps of every frame of a store."""

    maps: dict[str, Tensor]  # camera -> (variants, N, C, h, w); on a GPU in half precision

    def __call__(self, camera: str, rows: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """Maps by row, (..., C, h, w), of one variant for each of (N,) owners; the same draw gives the same variants."""
        kept = self.maps[camera]
        kinds, of = owner.cpu().unique(return_inverse=True)
        variant = torch.randint(len(kept), (len(kinds),), generator=draw)[of].to(rows.device, non_blocking=True)
        return kept[variant.view(-1, *[1] * (rows.ndim - 1)), rows].float()


@dataclass(frozen=True)
class Encoding:
    """All frames of a store through a policy's encoder."""

    policy: Any
    store: FrameStore
    prepare: Any
    made: Recipe
    console: Console

    @property
    def variants(self) -> int:
        """How often each episode is encoded."""
        return VARIANTS if self.made.jitter else 1

    @cached_property
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
        store = self.store
        rest = [fingerprint(Path(store.meta.root)), list(store.cameras), store.device.type, self.variants]
        found.update(json.dumps([*rest, self.made.jitter, way], sort_keys=True).encode())
        return found.hexdigest()[:24]

    def pictures(self, rows: Tensor, variant: int = 0) -> list[Tensor]:
        """Frames as the encoder gets them, one tensor a camera; the first variant is not augmented."""
        store, jitter = self.store, Jitter(self.made.jitter if variant else 0.0)
        owner = store.episode_of(rows)
        batch: dict[str, Any] = {OBS_STATE: store.columns[OBS_STATE][rows]}
        for number, camera in enumerate(store.cameras):
            seen = []
            for episode in owner.unique().tolist():  # what an episode looks like does not depend on its neighbours here
                draw, mine = generator(variant, number, episode, 5), owner == episode
                seen.append(jitter(store.pictures(camera, rows[mine]), owner[mine], draw))
            batch[camera] = torch.cat(seen)
        batch = self.prepare(batch)
        return [batch[camera] for camera in store.cameras]

    def fit(self) -> None:
        """Gives an encoder whose weights are drawn the statistics of some of the pictures."""
        store = self.store
        count, pixels = int(store.ends[-1]), sum(kept.shape[-2] * kept.shape[-1] for kept in store.cameras.values())
        few = max(1, min(SAMPLE, count, PIXELS // pixels))
        sample = self.pictures(torch.linspace(0, count - 1, few, device=store.device).long())
        if len({x.shape for x in sample}) > 1:
            sizes = ", ".join(
                f"{camera} {tuple(x.shape[-2:])}" for camera, x in zip(store.cameras, sample, strict=True)
            )
            raise UsageError(
                f"backbone: frozen, but cameras have different sizes ({sizes}); take some with cameras=..."
            )
        for backbone in self.policy.backbones:
            calibrate(backbone, torch.cat(sample))

    def check(self, needed: int) -> None:
        """Refuses maps of so many bytes if there is no room for them."""
        device, count = self.store.device, int(self.store.ends[-1])
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ram()
        if needed > ROOM * free:
            raise DatasetError(
                f"backbone: frozen needs {needed / 1e9:.1f} GB for the feature maps of {count} frames, {self.variants} "
                f"times each; {free / 1e9:.1f} GB are there. Fewer cameras, no jitter, or smaller pictures"
            )

    def maps(self) -> dict[str, Tensor]:
        """Maps of all variants of all frames."""
        store, count = self.store, int(self.store.ends[-1])
        kind = torch.float16 if store.device.type == "cuda" else torch.float32
        one = self.policy.encode(self.pictures(torch.zeros(1, dtype=torch.int64, device=store.device)))
        self.check(sum(x.numel() for x in one) * kind.itemsize * self.variants * count)
        maps = {
            camera: x.new_empty(self.variants, count, *x.shape[1:], dtype=kind)
            for camera, x in zip(store.cameras, one, strict=True)
        }
        with progress("encoding frames, once", self.variants * count, console=self.console) as bar:
            for variant in range(self.variants):
                for rows in torch.arange(count, device=store.device).split(AT_ONCE):
                    found = self.policy.encode(self.pictures(rows, variant))
                    for camera, x in zip(store.cameras, found, strict=True):
                        maps[camera][variant, rows] = x.to(kind)
                    bar.advance(len(rows))
        return maps


@torch.no_grad()
def encode(
    policy: Any,
    store: FrameStore,
    prepare: Any,
    made: Recipe,
    console: Console,
    *,
    cache: Path | None = None,
) -> FeatureMaps:
    """Freezes the policy's encoder, fits it to the pictures if its weights are drawn, and uses it on all of them, or
    takes the maps that another run has left in the cache.
    """
    if not policy.backbones:
        raise UsageError("backbone: got frozen, but the policy has no pictures")
    if getattr(policy.config, "crop_shape", None) is not None and policy.config.crop_is_random:
        raise UsageError(
            f"backbone: got frozen, but pictures are cropped anew each time (policy.crop_shape={policy.config.crop_shape}); "
            "expected policy.crop_shape=null, or policy.crop_is_random=false"
        )
    for backbone in policy.backbones:
        backbone.eval().requires_grad_(requires_grad=False)
    encoding = Encoding(policy, store, prepare, made, console)
    if policy.config.pretrained_backbone_weights is None:
        encoding.fit()
    for backbone in policy.backbones:
        to_channels_last(backbone)
    if cache is None:
        return FeatureMaps(encoding.maps())
    with held(cache / "features"):  # whoever comes second waits, and need not do it again
        kept = cache / "features" / f"{encoding.digest}.safetensors"
        if not kept.exists():
            maps, new = encoding.maps(), kept.with_suffix(".tmp")
            try:
                save_file(maps, new)
            except (OSError, SafetensorError) as error:
                new.unlink(missing_ok=True)
                raise DatasetError(f"{kept}: feature maps could not be written ({error}). Make room there") from error
            new.replace(kept)
            return FeatureMaps(maps)
    encoding.check(kept.stat().st_size)
    try:
        return FeatureMaps(load_file(kept, device=str(store.device)))
    except SafetensorError as error:
        raise DatasetError(f"{kept}: cannot be read ({error}). Remove it, and it is made anew") from error
