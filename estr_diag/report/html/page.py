"""What every page shares: the template engine, the style and the script that are put into it, and text that is safe in it."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from estr_diag.report.inert import inert

_TEMPLATES = files("estr_diag.report.html") / "templates"
MAX_TEXT = 300
"""Characters of one text of a log that a page shows."""


def render(template: str, **values: Any) -> str:
    """Fill a template; every value is escaped unless it is marked as markup."""
    return environment().get_template(template).render(style=_asset("style.css"), script=_asset("page.js"), **values)


@cache
def environment() -> jinja2.Environment:
    """Return the engine: it escapes everything, and refuses a name that is not given."""
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (_TEMPLATES / name).read_text("utf-8")),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["text"] = text
    return found


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Return text of a log with what acts on a page shown as an escape, and cut to a length; not yet escaped for HTML."""
    found = str(value)
    cut = found[:limit]
    return inert(cut, "\n") + (f"… ({len(found):,} characters)" if len(found) > limit else "")


def data(value: Any) -> Markup:
    """Return JSON that is inert inside a ``<script type="application/json">``."""
    dumped = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def _asset(name: str) -> Markup:
    # Ours, not a log's: the two files beside the templates.
    return Markup((_TEMPLATES / name).read_text("utf-8"))
