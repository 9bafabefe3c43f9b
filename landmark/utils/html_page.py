"""HTML files that work without a network: style, scripts and data are inside, and the browser runs no other script."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from typing import Any


def self_contained_page(template: str, style: str, scripts: Sequence[str], content: Any, **texts: str) -> str:
    """Fill an HTML template. content: for the scripts, as JSON. texts: shown as text, never as HTML. Raises ValueError
    for a script that holds its own end tag, and for a number that is not finite.
    """
    if any("</script" in script.lower() for script in scripts):
        raise ValueError("a script holds </script: it would end there")
    # "<" is escaped, or a text of the content could end the element.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy(style, *scripts)}">',
        "style": f"<style>{style}</style>",
        "content": f'<script type="application/json" id="content">{data}</script>',
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    } | {name: html.escape(text) for name, text in texts.items()}
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def policy(style: str, *scripts: str) -> str:
    """A Content-Security-Policy: this style, these scripts and pictures inside the page, and nothing else."""
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    return f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {allowed}"


def _hash(text: str) -> str:
    """The source of a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
