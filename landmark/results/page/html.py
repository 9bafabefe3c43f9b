"""The content of the page as one HTML file that asks no server for anything.

The page's policy allows only this style and these scripts, by their hashes, and forbids to run text as code: Vega
interprets its expressions. Records are shown as text, never as HTML.
"""

import base64
import hashlib
import json
import math
import re
from importlib.resources import files
from typing import Any


def as_html(content: dict[str, Any]) -> str:
    """The file for the content that `page_content` returns."""
    import vl_convert

    folder = files("landmark.results.page")
    template, style, *own = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "charts.js", "page.js")
    )
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    script = "\n".join(own)
    text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"style": style, "library": library, "script": script, "content": text}
    parts |= {f"{name}_hash": _hash(parts[name]) for name in ("style", "library", "script")}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _finite(value: Any) -> Any:
    """JSON has no NaN: None stands for a missing number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
