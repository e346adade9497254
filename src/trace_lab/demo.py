"""`make demo`: for now the method alone, on the synthetic probe. The robot suite and its policies will take its place."""

from pathlib import Path

from rich.console import Console


def demo(out: Path = Path("outputs/demo")) -> int:
    """Trains one small model without memory and with TRACE on a task whose cue disappears, and compares their answers.

    Args:
        out: folder for curves.png and results.json.
    """
    from trace_lab.probe import probe

    console = Console()
    console.print(
        "A small robot sees a framed colour, wanders for 32 steps, and is asked which colour it was.\n"
        "The same model is trained twice: without memory, and with TRACE. This takes a minute or two on two cores.\n"
        "(The demonstration on simulated robot tasks, with LeRobot policies and videos, is not built yet.)\n"
    )
    return probe(memory=("none", "trace"), delay=32, updates=400, batch=32, lengths=(2, 8), out=out)
