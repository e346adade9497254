"""`tracemem params`: how large each map, adapter and memory is, counted from the modules themselves."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trace_memory.adapters import DiffusionAdapter, FeatureModulation, RegressionAdapter
from trace_memory.config import MEMORIES, PRESETS, MemoryConfig, build
from trace_memory.memory import Memory

# Outputs of the maps of the condition in LeRobot's U-Net (scale and shift), two a level: down, in the middle, up.
UNET = [2 * width for width in (512, 1024, 2048, 2048, 1024, 512) for _ in range(2)]


def count(module: nn.Module) -> int:
    """Learned numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def maps(memory: Memory) -> Iterator[tuple[str, str, int]]:
    """Each map of TRACE with its layers, e.g. ("phi_g", "5219 -> 512 -> 512", 2935296)."""
    for owner in ("keys", "slots"):
        for name, child in getattr(memory, owner).named_children():
            layers = [layer for layer in child.modules() if isinstance(layer, nn.Linear)]
            if layers:
                widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
                yield name, " -> ".join(map(str, widths)), count(child)


def adapters(c: MemoryConfig) -> dict[str, dict[str, int]]:
    """Parts of each adapter and their sizes."""
    regression, diffusion = RegressionAdapter(c.width, c.width), DiffusionAdapter(c.width, c.hidden, UNET)
    modulation = FeatureModulation(c.width, c.width)
    return {
        "regression": {
            "W_M: slots to tokens": count(regression.W_M),
            "[z, g, dg] to summary": count(regression.summary),
        },
        "regression, optional": {"feature modulation": count(modulation)},
        "diffusion": {
            "[pool, z, g, dg] to a condition": count(diffusion.map),
            "its columns in the U-Net's maps": count(diffusion.columns),
        },
    }


def memories(c: MemoryConfig) -> dict[str, dict[str, float]]:
    """For every memory: learned numbers, bytes of state a row, million multiply-adds a step (matrix products)."""
    table = {}
    for name in MEMORIES:
        memory = build(replace(c, name=name)).eval()
        state, content, point = memory.init(1), torch.zeros(1, c.content), torch.zeros(1, c.channels)
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            memory.step(state, content, point)
        table[name] = {
            "parameters": count(memory),
            "state_bytes": memory.state_bytes,
            "mega_mac_per_step": round(flops.get_total_flops() / 2e6, 2),
        }
    return table


def params(
    preset: Literal["paper", "default", "tiny"] = "paper",
    *,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Counts the parameters of every map, adapter and memory.

    Args:
        preset: sizes and form of the memory; `paper` is the paper's own (updater 11,905,025).
        json_: print JSON instead of tables.
    """
    config = PRESETS[preset]
    memory = build(config)
    result = {
        "preset": preset,
        "updater": count(memory),
        "maps": {name: {"layers": layers, "parameters": size} for name, layers, size in maps(memory)},
        "adapters": {name: parts | {"total": sum(parts.values())} for name, parts in adapters(config).items()},
        "memories": memories(config),
    }
    if json_:
        print(json.dumps(result, indent=2))  # noqa: T201
        return 0
    console = Console()
    table = Table("map", "layers", "parameters", title=f"TRACE updater, preset {preset}")
    for name, layers, size in maps(memory):
        table.add_row(name, layers, f"{size:,}")
    table.add_section()
    table.add_row("updater", "", f"{count(memory):,}")
    console.print(table)
    table = Table("adapter", "part", "parameters", title="Policy adapters")
    for name, parts in adapters(config).items():
        for part, size in parts.items():
            table.add_row(name, escape(part), f"{size:,}")
    console.print(table)
    table = Table("memory", "parameters", "state, bytes a row", "million multiply-adds a step", title="All memories")
    for name, row in memories(config).items():
        table.add_row(name, f"{row['parameters']:,}", f"{row['state_bytes']:,}", f"{row['mega_mac_per_step']:,}")
    console.print(table)
    return 0
