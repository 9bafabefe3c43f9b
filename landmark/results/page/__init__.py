"""One HTML file of all that was measured: tables beside the paper's, pictures, where each number comes from."""

from landmark.results.page.content import page_content
from landmark.results.page.html import as_html

__all__ = ["as_html", "page_content"]
