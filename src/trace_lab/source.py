"""The dataset a training learns from, as files: is it one at all, and is it still the same? Nothing heavy is imported here;
pictures and numbers are read in `frames`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trace_errors import DatasetError

EDGE = 1 << 20  # bytes of a video's ends that count in its digest
NEEDED = ("observation.state", "action")


def describe(root: Path) -> dict[str, Any]:
    """LeRobot's own description of a dataset (`meta/info.json`).

    Raises:
        DatasetError: the folder is not that of a LeRobot dataset, or the dataset is empty or lacks states or actions.
    """
    note = root / "meta" / "info.json"
    try:
        info = json.loads(note.read_text())
        features, episodes, frames = (info[name] for name in ("features", "total_episodes", "total_frames"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DatasetError(f"{root}: no meta/info.json there, expected the folder of a LeRobot dataset (v3)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{note}: cannot be read ({error!r}), expected the description of a LeRobot dataset"
        ) from error
    if not episodes or not frames:
        raise DatasetError(f"{root}: the dataset is empty ({episodes} episodes)")
    for name in NEEDED:
        if name not in features:
            raise DatasetError(f"{root}: has no feature {name!r}; its features are {', '.join(features)}")
    return dict(info)


def fingerprint(root: Path) -> dict[str, str]:
    """A digest of each file of a dataset: all of it for tables and descriptions, size and both ends for videos."""
    found = {}
    for path in sorted(p for part in ("meta", "data", "videos", "images") for p in (root / part).glob("**/*")):
        name = path.relative_to(root).as_posix()
        if not path.is_file() or name.startswith("meta/trace_"):  # ours: score sheets and what memories keep
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            if path.suffix in {".mp4", ".mkv", ".png", ".jpg"}:
                size = path.stat().st_size
                digest.update(str(size).encode())
                digest.update(file.read(EDGE))
                file.seek(max(0, size - EDGE))
            digest.update(file.read())
        found[name] = digest.hexdigest()[:16]
    return found


def changes(before: dict[str, str], now: dict[str, str]) -> str:
    """What differs between two fingerprints, in words; empty if nothing does."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if not names:
        return ""
    first = names[0]
    what = "is gone" if first not in now else "is new" if first not in before else "has other content"
    return f"{first} {what}" + (f", and {len(names) - 1} more differ" if len(names) > 1 else "")
