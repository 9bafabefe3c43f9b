"""A page holds what it is given, and its policy allows its own style and scripts alone."""

import base64
import hashlib
import html
import re

import pytest

from landmark.inspector.page import SCRIPTS
from landmark.utils.html_page import filled_page


def test_the_policy_has_the_hash_of_each_style_and_script():
    page = filled_page("landmark.inspector", SCRIPTS, content={}, title="", data="")
    elements = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, re.DOTALL)
    assert len(elements) == 1 + len(SCRIPTS), "a script holds the end of one"
    allowed = html.unescape(page)
    for text in elements:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in allowed
    assert "unsafe-inline" not in page
    with pytest.raises(ValueError, match="not JSON compliant"):
        filled_page("landmark.inspector", SCRIPTS, content={"k": float("nan")}, title="", data="")
