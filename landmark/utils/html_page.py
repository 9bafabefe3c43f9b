"""HTML files that work without a network: style, scripts and data are inside, and the browser runs no other script."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any


def filled_page(package: str, scripts: Sequence[str] = (), **values: Any) -> str:
    """The file page.html of a package, filled by Jinja, with its page.css and some scripts. values: shown as text, not
    as HTML. The policy allows this style, these scripts and pictures inside the page. Raises ValueError for a number
    that is not finite.
    """
    import jinja2
    from markupsafe import Markup

    names = ("page.html", "page.css", *scripts)
    template, style, *code = ((files(package) / name).read_text("utf-8") for name in names)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    allowed = " ".join(map(_hash, code)) or "'none'"
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {allowed}"
    safe = {"style": Markup(style), "scripts": [Markup(script) for script in code]}
    return environment.from_string(template).render(values, policy=policy, **safe)


def _hash(text: str) -> str:
    """The source of a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
