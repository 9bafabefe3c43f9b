"""The content of the page as one HTML file. The browser may run no text as code: Vega interprets its expressions."""

import math
from importlib.resources import files
from typing import Any

from landmark.utils.html_page import self_contained_page


def as_html(content: dict[str, Any]) -> str:
    """The file for the content that `page_content` returns."""
    import vl_convert

    folder = files("landmark.results.page")
    template, style, *scripts = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "charts.js", "page.js")
    )
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    return self_contained_page(template, style, [library, "\n".join(scripts)], _finite(content))


def _finite(value: Any) -> Any:
    """JSON has no NaN: None stands for a missing number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
