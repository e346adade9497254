#!/usr/bin/env python3
"""Records goldens: digests of what every case gives, into goldens.safetensors.

    PYTHONPATH=tests python -m goldens.record NAME [NAME ...]     these cases anew, after an intended change (see README.md)
    PYTHONPATH=tests python -m goldens.record --all               all of them

Cases of the paper's form never change: they are recorded only where there are none yet.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from goldens import cases, material

FILE = Path(__file__).with_name("goldens.safetensors")


def read() -> dict[str, tuple[list[str], torch.Tensor]]:
    """What is recorded, by case."""
    if not FILE.exists():
        return {}
    with safe_open(FILE, "pt") as file:
        words = json.loads(file.metadata()["names"])
        return {case: (words["lists"][place], file.get_tensor(case)) for case, place in words["cases"].items()}


def write(found: dict[str, tuple[list[str], torch.Tensor]]) -> None:
    """All cases; lists of names that several have are stored once."""
    lists: list[list[str]] = []
    places = {}
    for case in sorted(found):
        names = found[case][0]
        if names not in lists:
            lists.append(names)
        places[case] = lists.index(names)
    words = json.dumps({"lists": lists, "cases": places}, separators=(",", ":"))
    save_file({case: found[case][1] for case in found}, FILE, {"names": words})


def main(asked: list[str], api: str = "goldens.api") -> int:
    """Records and says what it did."""
    torch.set_num_threads(1)
    module, found = importlib.import_module(api), read()
    if asked == ["--all"]:
        asked, found = list(cases.CASES), {case: x for case, x in found.items() if "paper" in case}
    for case in asked:
        if "paper" in case and case in found:
            sys.stdout.write(f"{case}: kept\n")
            continue
        begin = time.perf_counter()
        names, numbers = material.digests(cases.CASES[case][0](module))
        found[case] = (names, numbers)
        sys.stdout.write(f"{case}: {len(names)} tensors, {time.perf_counter() - begin:.1f} s\n")
        write(found)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
