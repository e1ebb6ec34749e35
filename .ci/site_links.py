"""A hook of mkdocs: Sphinx's roles in docstrings (``:class:`X` ``) become links or code."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>[~.]?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page; the autorefs plugin resolves the links that it returns."""
    return _ROLE.sub(_link, html)


def _link(found: re.Match[str]) -> str:
    name = found[1].rpartition(".")[2]
    code = f"<code>{name}</code>"
    if not found[1].startswith("distcollect."):
        return code
    return f'<autoref identifier="distcollect.{name}" optional>{code}</autoref>'
