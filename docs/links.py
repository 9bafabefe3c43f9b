"""A hook of mkdocs: links to files that are not pages of the site lead to the repository, if mkdocs.yml names one.

`tests/test_readme.py` checks that these files exist.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(!?)\[([^]]*)\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The text with other links; without a repository their words alone. Raises FileNotFoundError for a dead one."""
    folder = Path(config["docs_dir"]) / PurePosixPath(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        if mark or not config["repo_url"]:
            return text
        place = path.relative_to(Path(config["docs_dir"]).parent).as_posix()
        return f"[{text}]({config['repo_url'].rstrip('/')}/blob/main/{place})"

    return _LINK.sub(replaced, markdown)
