"""`tracemem params`: how large each map, adapter and memory is, counted from the modules themselves."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trace_memory.config import MemoryConfig, build
from trace_memory.registry import METHODS

if TYPE_CHECKING:
    from torch import nn

    from trace_memory.memory import Memory

# Outputs of the maps of the condition in LeRobot's U-Net (scale and shift), two a level: down, in the middle, up.
UNET = [2 * width for width in (512, 1024, 2048, 2048, 1024, 512) for _ in range(2)]


def count(module: "nn.Module") -> int:
    """Learned numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def maps(memory: "Memory") -> Iterator[tuple[str, str, int]]:
    """Each map of TRACE with its layers, e.g. ("phi_g", "5219 -> 512 -> 512", 2935296)."""
    from torch import nn

    from trace_memory.trace import SlotMemory

    for owner in (memory.keys, memory.slots) if isinstance(memory, SlotMemory) else (memory,):
        for name, child in owner.named_children():
            layers = [layer for layer in child.modules() if isinstance(layer, nn.Linear)]
            if layers:
                widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
                yield name, " -> ".join(map(str, widths)), count(child)


def adapters(c: MemoryConfig) -> dict[str, dict[str, int]]:
    """Parts of each adapter and their sizes."""
    from trace_memory.adapters import ConditionAdapter, FeatureModulation, RegressionAdapter

    regression, condition = RegressionAdapter(c.width, c.width), ConditionAdapter(c.width, c.hidden)
    return {
        "regression": {
            "W_M: slots to tokens": count(regression.W_M),
            "[z, g, dg] to summary": count(regression.summary),
        },
        "regression, optional": {"feature modulation": count(FeatureModulation(c.width, c.width))},
        "diffusion": {
            "[pool, z, g, dg] to a condition": count(condition.map),
            "its columns in the U-Net's blocks": sum(c.width * outputs for outputs in UNET),
        },
    }


def memories(width: int, hidden: int) -> dict[str, dict[str, float]]:
    """For every memory: learned numbers, bytes of state a row, million multiply-adds (matrix products) a step late in a long
    episode, when all that a memory keeps is filled.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    table = {}
    for name in METHODS:
        memory = build(MemoryConfig(name=name, content=2 * width, width=width, hidden=hidden)).eval()
        content, point = torch.zeros(1, memory.content), torch.zeros(1, memory.channels)
        state = memory.init(1)._replace(steps=torch.tensor([100_000]))
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            memory.step(state, content, point)
        table[name] = {
            "parameters": count(memory),
            "state_bytes": memory.state_bytes,
            "mega_mac_per_step": round(flops.get_total_flops() / 2e6, 2),
        }
    return table


def params(
    width: int = 512,
    hidden: int = 512,
    *,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Counts the parameters of every map, adapter and memory, for robot states of 17 channels.

    Args:
        width: of slots, keys and readouts; what is seen is twice as wide.
        hidden: of the maps' hidden layers. The defaults are the paper's sizes: its updater has 11,905,025 parameters.
        json_: print JSON instead of tables.
    """
    config = MemoryConfig(content=2 * width, width=width, hidden=hidden)
    forms = {name: build(replace(config, name=name)) for name, method in METHODS.items() if method.kind == "trace"}
    counted: dict[str, Any] = {
        "forms": {
            name: {
                "updater": count(memory),
                "maps": {part: {"layers": layers, "parameters": size} for part, layers, size in maps(memory)},
            }
            for name, memory in forms.items()
        },
        "adapters": {name: parts | {"total": sum(parts.values())} for name, parts in adapters(config).items()},
        "memories": memories(width, hidden),
    }
    if json_:
        print(json.dumps({"width": width, "hidden": hidden} | counted, indent=2))  # noqa: T201
        return 0
    console = Console()
    for name, form in counted["forms"].items():
        table = Table("map", "layers", "parameters", title=f"{METHODS[name].label}: the updater")
        for part, row in form["maps"].items():
            table.add_row(part, row["layers"], f"{row['parameters']:,}")
        table.add_section()
        table.add_row("updater", "", f"{form['updater']:,}")
        console.print(table)
    table = Table("adapter", "part", "parameters", title="Policy adapters")
    for name, parts in counted["adapters"].items():
        for part, size in parts.items():
            if part != "total":
                table.add_row(name, escape(part), f"{size:,}")
    console.print(table)
    table = Table("memory", "parameters", "state, bytes a row", "million multiply-adds a step", title="All memories")
    for name, row in counted["memories"].items():
        table.add_row(name, f"{row['parameters']:,}", f"{row['state_bytes']:,}", f"{row['mega_mac_per_step']:,}")
    console.print(table)
    return 0
