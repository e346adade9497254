"""Every memory by name: which callable makes it, and how tables and figures show it. The only such list. Imports no torch,
so that tables, figures and `tracemem --help` can use it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from trace_errors import UsageError


@dataclass(frozen=True)
class Method:
    """One memory, by the name that options, files and tables give it.

    Args:
        name: the word for it in options, files and tables.
        target: a callable that makes the memory from a `MemoryConfig`, or "module:attribute" of one, which is imported only
            when it is needed.
        label: what tables and figures call it.
        colour: of its marks in figures.
        kind: "none"; "trace", a form of the method; "ablation", that form with one part exchanged; or "baseline", anything
            else.
        paper_form: it is the paper's form, or an ablation of it: it takes `PaperOptions`, sees each camera's feature map
            pooled to one vector, and is trained without path swap unless that is asked for.
        swaps_paths: an episode's memory may be addressed by another one's path in training; not so of a memory that knows
            nothing but its path.
        looks: it takes in a map of the picture, and can point at what it remembers.

    Example:
        >>> from trace_memory import METHODS
        >>> METHODS["gru"].label
        'GRU'
    """

    name: str
    target: str | Callable[..., Any]
    label: str
    colour: str
    kind: Literal["none", "trace", "ablation", "baseline"] = "baseline"
    paper_form: bool = field(default=False, kw_only=True)
    swaps_paths: bool = field(default=True, kw_only=True)
    looks: bool = field(default=False, kw_only=True)

    def load(self) -> Callable[..., Any]:
        """The callable that makes the memory.

        Returns:
            From a `MemoryConfig` to a `Memory`.
        """
        if not isinstance(self.target, str):
            return self.target
        module, attribute = self.target.split(":")
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        made: Callable[..., Any] = found
        return made


METHODS: dict[str, Method] = {}  # in the order of tables


def register(method: Method) -> Method:
    """Adds a memory, which `build`, the policies and the tables then know by its name.

    Args:
        method: the memory; its name must be new.

    Returns:
        The same method.

    Raises:
        UsageError: a memory of that name is registered already.

    Example:
        >>> from trace_memory import METHODS, Method, register
        >>> from trace_memory.baselines import NoMemory
        >>> method = register(Method("nothing", NoMemory.from_config, "nothing", "#000000"))
        >>> del METHODS["nothing"]
    """
    if method.name in METHODS:
        raise UsageError(f"method {method.name!r}: is registered already, expected a new name")
    METHODS[method.name] = method
    return method


def of_policies() -> list[str]:
    """The names of the memories that a policy can have: it gives them no map of the picture."""
    return [name for name, method in METHODS.items() if not method.looks]


def paper_forms() -> list[str]:
    """The names of the memories that are the paper's form, or an ablation of it."""
    return [name for name, method in METHODS.items() if method.paper_form]


for _method in (
    Method("none", "trace_memory.baselines:NoMemory.from_config", "no memory", "#7f7f7f", "none", swaps_paths=False),
    Method("trace", "trace_memory.trace:TraceMemory.from_config", "TRACE", "#d62728", "trace"),
    Method(
        "paper",
        "trace_memory.trace:PaperTraceMemory.from_config",
        "TRACE, paper's form",
        "#ff9896",
        "trace",
        paper_form=True,
    ),
    Method("events", "trace_memory.events:EventMemory.from_config", "events", "#ff7f0e", "trace", looks=True),
    Method("gru", "trace_memory.recurrent:GRUMemory.from_config", "GRU", "#1f77b4"),
    Method("transformer", "trace_memory.baselines:TransformerContext.from_config", "transformer context", "#2ca02c"),
    Method("lru", "trace_memory.recurrent:LRUMemory.from_config", "LRU slots", "#9467bd"),
    Method("retrieval", "trace_memory.baselines:RetrievalPrompt.from_config", "retrieval prompt", "#8c564b"),
    Method("delta", "trace_memory.recurrent:DeltaMemory.from_config", "gated delta rule", "#393b79"),
    Method("ssm", "trace_memory.recurrent:SSMMemory.from_config", "state-space model", "#637939"),
    Method("window", "trace_memory.baselines:WindowAttention.from_config", "gated window", "#e7969c"),
    Method(
        "current", "trace_memory.ablations:CurrentObservation.from_config", "current observation", "#c7c7c7", "ablation"
    ),
    Method(
        "signature-only",
        "trace_memory.ablations:SignatureOnly.from_config",
        "signature only",
        "#bcbd22",
        "ablation",
        swaps_paths=False,
    ),
    Method("unrouted", "trace_memory.ablations:unrouted", "unrouted slots", "#17becf", "ablation"),
    Method("no-delta", "trace_memory.ablations:no_delta", "no delta key", "#e377c2", "ablation"),
    Method("mean-read", "trace_memory.ablations:mean_read", "mean readout", "#aec7e8", "ablation"),
    Method(
        "no-auxiliary",
        "trace_memory.ablations:no_auxiliary",
        "no auxiliary losses",
        "#98df8a",
        "ablation",
        paper_form=True,
    ),
):
    register(_method)

for _name, _label, _colour in (  # the memory of events, found by other things
    ("seen", "what was seen", "#9ecae1"),
    ("state", "the state", "#6baed6"),
    ("steps", "count of steps", "#fdae6b"),
    ("clock", "event clock", "#e6550d"),
    ("signature", "signature", "#74c476"),
    ("log-signature", "log-signature", "#a1d99b"),
    ("rotations", "controlled equation", "#9e9ac8"),
    ("clock-signature", "clock and signature", "#756bb1"),
):
    _target = f"trace_memory.ablations:by_{_name.replace('-', '_')}"
    register(Method(f"events-{_name}", _target, f"events by {_label}", _colour, "ablation", looks=True))
