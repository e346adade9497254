"""A report as one HTML file that opens anywhere, without a network: pictures and videos are inside it."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { padding: .4rem .8rem; border-bottom: 1px solid #d5dae2; text-align: left; }
img, video { max-width: 100%; border-radius: 6px; } figure { margin: 1rem 0; }
figcaption { color: #5a6475; font-size: .9rem; }
.films { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
code { background: #f0f2f5; padding: .1rem .3rem; border-radius: 4px; }
"""
KINDS = {".png": "image/png", ".mp4": "video/mp4", ".webp": "image/webp"}
# The films of a row are started, stopped and moved together.
SYNC = """
for (const row of document.querySelectorAll(".together")) {
  const films = [...row.querySelectorAll("video")];
  for (const film of films) for (const [name, act] of [
    ["play", (x) => x.play()], ["pause", (x) => { if (!film.ended) x.pause(); }],
    ["seeked", (x) => { if (Math.abs(x.currentTime - film.currentTime) > 0.2) x.currentTime = film.currentTime; }],
  ]) film.addEventListener(name, () => films.filter((x) => x !== film).forEach(act));
}
"""


class Page:
    """Collects what a report shows, from top to bottom."""

    def __init__(self, title: str):
        self.title = title
        self.script = ""
        self.parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """A new section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, words: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(words)}</p>")

    def table(self, names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Rows under names."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
        self.parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def picture(self, path: Path, caption: str) -> None:
        """A PNG, or an animated WebP."""
        shown = f'<img src="{embedded(path)}" alt="{html.escape(caption)}">'
        self.parts.append(f"<figure>{shown}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def films(self, films: Sequence[tuple[Path, str]]) -> None:
        """Videos side by side, played in step."""
        shown = "".join(
            f'<figure><video src="{embedded(path)}" controls muted></video>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            for path, caption in films
        )
        self.script = f"<script>{SYNC}</script>"
        self.parts.append(f'<div class="films together">{shown}</div>')

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{STYLE}</style>'
        temporary = path.with_suffix(".tmp")
        temporary.write_text(
            f"<!doctype html><html><head>{head}</head><body>{''.join(self.parts)}{self.script}</body></html>"
        )
        temporary.replace(path)


def embedded(path: Path) -> str:
    """A file as an address that contains it."""
    return f"data:{KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
