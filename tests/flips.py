"""Copies of saved files, in each of which one bit is another."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path


def flipped(saved: Path, copies: Path, count: int, seed: int = 0) -> Iterator[Path]:
    """Copies of a file or a folder: for each of its files `count`, each with a bit flipped at a random place of it."""
    draw = random.Random(seed)
    for file in (
        [saved]
        if saved.is_file()
        else sorted(path for path in saved.rglob("*") if path.is_file() and path.stat().st_size)
    ):
        for number in range(count):
            copied = copies / f"{file.name}-{number}"
            shutil.copytree(saved, copied) if saved.is_dir() else shutil.copyfile(saved, copied)
            path = copied / file.relative_to(saved) if saved.is_dir() else copied
            content = bytearray(path.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            yield copied
