"""One self-contained HTML page: its style, and small functions that make escaped pieces of it.

Every argument named `html` is markup made by these functions; every other text is escaped here.
"""

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #161a22; --muted: #5b6473; --line: #e1e5eb; --accent: #1f6fbf;
  --notice: #fdf3e7; --shadow: 0 1px 2px rgb(16 24 40 / 6%), 0 1px 3px rgb(16 24 40 / 4%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #161b22; --ink: #e8ebf0; --muted: #9aa4b2; --line: #2a313c; --accent: #6cb2f5;
    --notice: #2b2116; --shadow: none;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1280px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 0; color: var(--muted); }
.kicker { font-size: 12px; font-weight: 600; letter-spacing: .09em; text-transform: uppercase; }
header .kicker { color: var(--accent); }
h1 { margin: 4px 0; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 19px; letter-spacing: -.01em; }
h3 { margin: 0; font-size: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow); }
.notice { margin: 24px 0 0; padding: 14px 20px; background: var(--notice); border: 1px solid var(--line);
  border-left: 4px solid #e0732f; border-radius: 8px; }
.notice ul { margin: 4px 0 0; padding-left: 20px; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 14px; margin: 28px 0 0; }
.keys > div { padding: 16px 18px; }
.keys dt { color: var(--muted); font-size: 13px; }
.keys dd { margin: 0; }
.keys .value { font-size: 23px; font-weight: 600; white-space: nowrap; line-height: 1.35; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.keys .note { color: var(--muted); font-size: 13px; line-height: 1.4; }
.plots, .columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.columns { row-gap: 0; }
@media (max-width: 900px) { .plots, .columns { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; padding: 16px 18px 8px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption p { margin: 1px 0 0; color: var(--muted); font-size: 13px; }
.plot { height: 290px; }
.plot.tall { height: 400px; }
.plot .infolayer text, .plot .xtick text, .plot .ytick text, .plot .x2tick text, .plot .y2tick text,
.plot .bartext { fill: var(--muted) !important; }
.plot .gridlayer path { stroke: var(--line) !important; }
.plot .xlines-above, .plot .ylines-above { stroke: var(--line) !important; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th, td { padding: 9px 18px; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
thead th { color: var(--muted); font-size: 12px; font-weight: 600; }
tbody th { font-weight: 500; white-space: nowrap; }
td { overflow-wrap: anywhere; }
code, pre, td:nth-child(2) { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  font-size: 13px; }
td:nth-child(3) { color: var(--muted); }
pre { margin: 0; padding: 16px 18px; white-space: pre-wrap; overflow-wrap: anywhere; }
.absent { margin: 0; padding: 14px 18px; color: var(--muted); }
footer { margin-top: 48px; color: var(--muted); font-size: 13px; }
@media print { body { background: none; } .card { break-inside: avoid; box-shadow: none; } }
"""

# The page loads nothing, and a script that fails says so where a test (or a person with the inspector) finds it.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
WATCH = "window.addEventListener('error', event => { document.documentElement.dataset.error = event.message; });"


def document(title: str, html: Iterable[str]) -> str:
    """The whole page: plotly.js inlined once, then the given parts inside `<main>`."""
    content = "\n".join(html)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<script>{WATCH}</script>
<script>{get_plotlyjs()}</script>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def header(kicker: str, title: str, line: str) -> str:
    """The page's heading, with a word above it and a line of facts below it."""
    return f'<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1><p>{escape(line)}</p></header>'


def notice(title: str, lines: Sequence[str]) -> str:
    """A box that says what is missing; nothing where nothing is."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notice" role="note"><strong>{escape(title)}</strong><ul>{items}</ul></div>'


def key_figures(figures: Iterable[tuple[str, str, str]]) -> str:
    """A row of (name, value, note)."""
    cards = (
        f'<div class="card"><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for name, value, note in figures
    )
    return f'<dl class="keys" aria-label="Key figures">{"".join(cards)}</dl>'


def section(title: str, *html: str) -> str:
    """A heading and what stands below it."""
    return f"<section><h2>{escape(title)}</h2>{''.join(html)}</section>"


def group(kind: str, html: Iterable[str]) -> str:
    """Parts side by side; `kind` is a class of the style sheet: plots or columns."""
    return f'<div class="{kind}">{"".join(html)}</div>'


def plot(name: str, figure: go.Figure, title: str, caption: str, *, wide: bool = False, tall: bool = False) -> str:
    """A card with a plot; the caption says in words what the plot shows. `name` is its id in the page."""
    config = {"displayModeBar": False, "displaylogo": False, "responsive": True}
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=name)
    label = escape(f"{title}: {caption}")
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p>'
        f'</figcaption><div class="plot{" tall" if tall else ""}" role="img" aria-label="{label}">{html}</div></figure>'
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a card; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        if body
        else absent("No entries.")
    )


def preformatted(text: str) -> str:
    """Text as it is, in a card."""
    return f'<pre class="card">{escape(text)}</pre>'


def absent(text: str) -> str:
    """What stands where something was not recorded."""
    return f'<p class="card absent">{escape(text)}</p>'
