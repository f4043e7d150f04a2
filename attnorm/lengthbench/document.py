"""A report as blocks, and the blocks as Markdown and as one HTML file that needs nothing else."""

import base64
import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Image:
    path: str  # beside the Markdown file
    svg: bytes
    caption: str


Block = Heading | Text | Table | Image

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #888; }
img { width: 100%; }
figcaption { color: #555; font-size: 13px; }
"""


def as_markdown(blocks: Sequence[Block]) -> str:
    """
    >>> from attnorm.lengthbench.document import Heading, Table, as_markdown
    >>> print(as_markdown([Heading("Costs"), Table(["", "ms"], [["a|b", "1"]])]))
    ## Costs
    <BLANKLINE>
    |  | ms |
    |---|---|
    | a\\|b | 1 |
    <BLANKLINE>
    """
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}")
            case Text(text):
                parts.append(text)
            case Table(header, rows):
                lines = [header, *rows]
                cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
                head, *body = (f"| {' | '.join(line)} |" for line in cells)
                parts.append("\n".join([head, "|" + "---|" * len(header), *body]))
            case Image(path, _, caption):
                parts.append(f"![{caption}]({path})")
    return "\n\n".join(parts) + "\n"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """Well-formed as XML too, so that a parser can check it."""
    body = "\n".join(map(_as_element, blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _as_element(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Table(header, rows):
            head = _row("th", header)
            return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"
        case Image(_, svg, caption):
            # As an image of its own, so that names within one figure do not meet those of another.
            data = base64.b64encode(svg).decode()
            text = html.escape(caption)
            return (
                f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"/>'
                f"<figcaption>{text}</figcaption></figure>"
            )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
