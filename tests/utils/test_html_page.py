"""A page holds what it is given, and its policy allows its own style and scripts alone."""

import base64
import hashlib
import re

import pytest

from landmark.utils.html_page import self_contained_page

TEMPLATE = "<head>{{policy}}<title>{{title}}</title>{{style}}</head><body>{{content}}{{scripts}}</body>"
SCRIPTS = ["const library = '{{title}}';", "console.log(library);"]


def test_the_policy_has_the_hash_of_each_style_and_script():
    page = self_contained_page(TEMPLATE, "b {}", SCRIPTS, {}, title="")
    elements = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page)
    assert elements == ["b {}", *SCRIPTS], "marks are replaced in the template alone"
    for text in elements:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert "unsafe-inline" not in page


def test_a_script_that_would_end_early_is_refused():
    with pytest.raises(ValueError, match="would end there"):
        self_contained_page(TEMPLATE, "", ["'</SCRIPT>'"], {}, title="")
