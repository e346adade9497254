"""`make demo`. Says what the demonstration will be; the parts it needs are built in the order of the CHANGELOG."""

from rich.console import Console


def demo() -> int:
    """Says what the demonstration will do once the suite and the training engine are built."""
    Console().print(
        "The set-up works. The demonstration itself is not built yet. It will collect demonstrations of one simulated "
        "task, train the same policy with and without memory, evaluate both on held-out episodes and write a report."
    )
    return 0
