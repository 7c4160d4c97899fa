"""Self-contained HTML page: style sheet, and functions that build escaped fragments.

Each argument named `html` is markup built by these functions. All other arguments are plain text and are escaped here.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from weft.files import replace_file

STYLE = files("weft.observe").joinpath("style.css").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the page loads nothing and runs no scripts


def document(title: str, html: Iterable[str]) -> str:
    """Complete page with the given fragments inside `<main>`."""
    content = "\n".join(html)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def write_report_page(run: Path, title: str, content: Sequence[str]) -> Path:
    """Write `report.html` into a run folder; an existing page is kept until the new one is complete.

    Args:
        run: run folder.
        title: title of the page.
        content: fragments of the page, without its footer.

    Returns:
        The path of the page.

    Raises:
        OSError: the page cannot be written.
    """
    written = f"Written by Weft on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the files in this folder."
    path = run / "report.html"
    replace_file(path, document(f"{title} · Weft", [*content, f"<footer>{written}</footer>"]))
    return path


def header(kicker: str, title: str, line: str) -> str:
    """Page heading, with a short label above it and a line of facts below it."""
    return f'<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1><p>{escape(line)}</p></header>'


def notice(title: str, lines: Sequence[str]) -> str:
    """Notice box with a list of lines; empty without lines."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notice" role="note"><strong>{escape(title)}</strong><ul>{items}</ul></div>'


def key_figures(figures: Iterable[tuple[str, str, str]]) -> str:
    """Row of key figures, each a (name, value, note)."""
    cards = (
        f'<div class="card"><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for name, value, note in figures
    )
    return f'<dl class="keys" aria-label="Key figures">{"".join(cards)}</dl>'


def section(title: str, *html: str) -> str:
    """Section with a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(html)}</section>"


def lead(text: str) -> str:
    """Lead sentence below a heading."""
    return f'<p class="lead">{escape(text)}</p>'


def group(kind: str, html: Iterable[str]) -> str:
    """Fragments side by side; `kind` is a class of the style sheet: "plots" or "columns"."""
    return f'<div class="{kind}">{"".join(html)}</div>'


def plot(name: str, html: str, title: str, caption: str, *, wide: bool = False, tall: bool = False) -> str:
    """Card with a chart and a caption that describes it in words. `name` is the id of the element."""
    label = escape(f"{title}: {caption}")
    return (
        f'<figure class="card{" wide" * wide}{" tall" * tall}"><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p>'
        f'</figcaption><div id="{name}" role="img" aria-label="{label}">{html}</div></figure>'
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table in a card. The first cell of a row is its heading; the other cells carry their column name for narrow pages."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)

    def cells(rest: Sequence[str]) -> str:
        named = zip(columns[1:], rest, strict=True)
        return "".join(f'<td data-column="{escape(column)}">{escape(cell)}</td>' for column, cell in named)

    body = "".join(f'<tr><th scope="row">{escape(first)}</th>{cells(rest)}</tr>' for first, *rest in rows)
    if not body:
        return absent("No entries.")
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(summary: str, html: str) -> str:
    """Collapsible content with a summary line."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def preformatted(text: str) -> str:
    """Preformatted text in a card."""
    return f'<pre class="card">{escape(text)}</pre>'


def picture(png: str, description: str) -> str:
    """Picture in a card; `png` is a PNG file in Base64."""
    return f'<p class="card"><img src="data:image/png;base64,{png}" alt="{escape(description)}"></p>'


def absent(text: str) -> str:
    """Placeholder card for data that were not recorded."""
    return f'<p class="card absent">{escape(text)}</p>'
