"""Lists source files longer than a limit; a long file usually hides a second noun."""

import argparse
import sys
from pathlib import Path


def long_files(roots: list[Path], limit: int) -> list[tuple[int, Path]]:
    files = sorted(path for root in roots for path in root.rglob("*.py"))
    counts = [(len(path.read_text().splitlines()), path) for path in files]
    return [(count, path) for count, path in counts if count > limit]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=400)
    arguments = parser.parse_args()
    found = long_files(arguments.roots, arguments.limit)
    for count, path in found:
        print(f"{path}: {count} lines, the limit is {arguments.limit}")
    sys.exit(bool(found))
