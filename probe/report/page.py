"""Reports as one self-contained HTML page: images and data inside, no network, no scripts.

A page is a list of sections, a section a list of blocks: text, tables, charts, code, formulas.
Everything that comes from files or results is escaped by the template.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from probe.figures.style import png_bytes
from probe.report.script import number

# A two-column figure of 7 inches is then 980 pixels wide: sharp enough, and small.
_DPI = 140


@dataclass(frozen=True)
class Chart:
    """A figure with what a reader needs beside it.

    Attributes:
        name: of its files, such as "probes".
        figure: the figure.
        data: what it shows, offered as CSV.
        shows: caption, what it shows.
        reading: caption, how to read it.
        alt: its message for those who cannot see it.
    """

    name: str
    figure: Figure
    data: pd.DataFrame
    shows: str
    reading: str
    alt: str


@dataclass(frozen=True)
class Listing:
    """A table with its caption."""

    table: pd.DataFrame
    caption: str


@dataclass(frozen=True)
class Code:
    """A command, shown as it is typed."""

    text: str


Block = str | Markup | Chart | Listing | Code


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it; a `str` is a paragraph, `Markup` is trusted HTML."""

    title: str
    blocks: Sequence[Block]


def render(title: str, claim: str, sections: Sequence[Section]) -> str:
    """The page as HTML text.

    Args:
        title: of the page.
        claim: the result in one sentence, shown first.
        sections: in order.
    """
    environment = Environment(
        loader=PackageLoader("probe", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"png": _png, "csv": _csv, "cell": _cell, "anchor": _anchor}
    environment.tests["numeric"] = pd.api.types.is_numeric_dtype
    environment.globals["zip"] = zip
    template = environment.get_template("report_template.html.j2")
    return template.render(
        title=title,
        claim=claim,
        sections=[(s.title, [_kind(b) for b in s.blocks]) for s in sections],
    )


def charts(sections: Sequence[Section]) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """All figures of a page with their data, as `probe.report.script.Output` takes them."""
    blocks = [block for section in sections for block in section.blocks]
    return {block.name: (block.figure, block.data) for block in blocks if isinstance(block, Chart)}


def _kind(block: Block) -> tuple[str, Block]:
    """Name of a block's form in the template. Markup is a str, so that it comes first."""
    forms = {Markup: "html", str: "text", Chart: "chart", Listing: "table", Code: "code"}
    return next(form for kind, form in forms.items() if isinstance(block, kind)), block


def _png(figure: Figure) -> str:
    """A figure as a data URI."""
    return _data_uri("image/png", png_bytes(figure, _DPI))


def _csv(table: pd.DataFrame) -> str:
    """A table as a data URI."""
    return _data_uri("text/csv", table.to_csv(index=False, float_format="%.6g").encode())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _cell(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
