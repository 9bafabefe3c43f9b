"""The source tree: its folders and its commit. An installed package has its settings and claims inside."""

import os
import subprocess
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "conf").is_dir()  # from a wheel: there is no source tree around the package
ROOT = _PACKAGE.parent  # of the source tree
CONF = (_PACKAGE if INSTALLED else ROOT) / "conf"  # configurations
EXPERIMENTS = (_PACKAGE if INSTALLED else ROOT) / "experiments"  # claims and results, a folder for each table or figure


@cache
def commit() -> str | None:
    """The commit, with + where tracked files were changed; without a source tree what LANDMARK_COMMIT says, or None."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return os.environ.get("LANDMARK_COMMIT")
    return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    if INSTALLED:  # a repository around an installed package is another project's
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
