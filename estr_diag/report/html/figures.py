"""Pictures in a page: SVG whose text is text, whose ink is the page's, and which is the same bytes for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

_INK = "#010203"
"""A colour that no picture uses: what is drawn in it takes the colour of the page's text, in light and in dark."""


def svg(
    name: str, draw: Callable[..., Any], *results: Any, size: tuple[float, float] = (7.2, 4.0), **options: Any
) -> Markup:
    """Draw a picture of `estr_diag.plots` as inline SVG.

    Parameters
    ----------
    name
        Of the figure in the page; its ids begin with it, so that no two pictures share one.
    draw
        A function of `plots`: Results in, ``ax=``.
    size
        Inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inked: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    )
    with mpl.rc_context({**inked, "svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(*results, ax=figure.add_subplot(), **options)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Markup(_inline(out.getvalue(), name))


def _inline(source: str, name: str) -> str:
    body = source[source.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    # A picture is as wide as its column, and as high as that makes it.
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = body.replace("<svg", '<svg role="img"', 1)
    body = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{name}-\1"', body)
    return body.replace(_INK, "currentColor").strip()
