"""Tables of results: rows of values under headings that know how a value reads, as Markdown and as JSON. What the values
mean is the business of `stats`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

DASH = "—"
type Show = Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """Rows of values under headings that know how a value reads; None is missing. The first note is the caption."""

    title: str
    columns: dict[str, Show]
    rows: list[tuple[Any, ...]]
    notes: tuple[str, ...] = ()
    bold: tuple[str, ...] = ()  # columns whose largest mean is


def markdown(tables: dict[str, Table], heading: str = "## {}") -> str:
    """The tables as Markdown: the best of a column bold, caption and notes below."""
    blocks = []
    for table in tables.values():
        shows, headings = table.columns.values(), list(table.columns)
        grid = [[DASH if v is None else show(v) for show, v in zip(shows, row, strict=True)] for row in table.rows]
        for index in map(headings.index, table.bold):
            means = {number: row[index].mean for number, row in enumerate(table.rows) if row[index] is not None}
            for number in (n for n, mean in means.items() if mean > max(means.values()) - 1e-9):
                grid[number][index] = f"**{grid[number][index]}**"
        lines = [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *grid)]
        blocks += [heading.format(table.title), *(["\n".join(lines)] if grid else []), *table.notes]
    return "\n\n".join(blocks) + "\n"


def to_json(tables: dict[str, Table]) -> dict[str, Any]:
    """The same as plain values: title, rows by heading and notes of each table."""
    whole = {}
    for key, table in tables.items():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        whole[key] = {"title": table.title, "rows": rows, "notes": table.notes}
    return dict(json.loads(json.dumps(whole, default=asdict)))  # tuples become lists
