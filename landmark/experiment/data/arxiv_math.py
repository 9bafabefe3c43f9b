"""arXiv Math: the papers in proof-pile, whose JSON lines name the config of each document in `meta`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from landmark.experiment.data.sources import SPLITS, Document, Source, existing_folder, fingerprint, json_texts
from landmark.utils.errors import UserError

HUB_NAME = "hoskinson-center/proof-pile"
HUB_FILES = {
    "train": [f"train/proofpile_train_{number}.jsonl.gz" for number in range(21)],
    "validation": ["dev/proofpile_dev.jsonl.gz"],
    "test": ["test/proofpile_test.jsonl.gz"],
}
_PATTERNS = {
    "train": ("train.jsonl", "train/proofpile_train_*.jsonl"),
    "validation": ("validation.jsonl", "dev/proofpile_dev.jsonl"),
    "test": ("test.jsonl", "test/proofpile_test.jsonl"),
}
_LAYOUT = "train.jsonl, validation.jsonl and test.jsonl, or proof-pile's train/, dev/ and test/, gzipped or not"


class ArxivMath(Source):
    """Documents are lines `{"text": …, "meta": {"config": …}}`. The hub's files are read over the network."""

    name = "arxiv_math"

    def __init__(self, path: Path | None, configs: Sequence[str] | None):
        """path: a local copy (None: the hub). configs: configs whose documents are taken (None: all)."""
        self._configs = None if configs is None else sorted(set(configs))
        self.identity = {"corpus": self.name, "configs": self._configs}
        if path is None:
            self.origin = HUB_NAME
            self.identity["hub"] = HUB_NAME
            address = f"hf://datasets/{HUB_NAME}"
            self._files = {split: [(name, f"{address}/{name}") for name in HUB_FILES[split]] for split in SPLITS}
            return
        root = existing_folder(path, _LAYOUT)
        self.origin = str(root)
        paths = {split: _split_files(root, split) for split in SPLITS}
        self.identity |= fingerprint(root, (file for split in SPLITS for file in paths[split]))
        self._files = {
            split: [(file.relative_to(root).as_posix(), str(file)) for file in paths[split]] for split in SPLITS
        }

    def documents(self, split: str) -> Iterator[Document]:
        found = set[str]()
        for name, place in self._files[split]:
            for document, text, record in json_texts(self.name, name, place):
                found.add(config := _config(document, record))
                if self._configs is None or config in self._configs:
                    yield Document(document, text)
        if self._configs is not None and not found & set(self._configs):
            names = ", ".join(sorted(found)) or "no document at all"
            raise UserError(
                f"{self.name}: no document of split {split!r} of {self.origin} has a config among "
                f"data.configs=[{','.join(self._configs)}]: found {names}; name some of these, or take all (null)"
            )


def make_source(path: Path | None, configs: Sequence[str] | None = ("arxiv",)) -> ArxivMath:
    """proof-pile, or some of its configs, from the Hugging Face hub or a local folder. Raises UserError for a missing
    folder, a split without files or with files of two kinds, and an empty `configs`.
    """
    if configs is not None and not configs:
        raise UserError("data.configs=[]: name at least one config (null: all)")
    return ArxivMath(path, configs)


def _split_files(root: Path, split: str) -> list[Path]:
    """`<root>/<split>.jsonl`, or the files of proof-pile's own layout, in which a split may have several."""
    patterns = [pattern + suffix for pattern, suffix in product(_PATTERNS[split], ("", ".gz"))]
    found = [pattern for pattern in patterns if any(root.glob(pattern))]
    if not found:
        raise UserError(f"arxiv_math: {root} holds nothing for split {split!r}: expected {_LAYOUT}")
    if len(found) > 1:
        raise UserError(f"arxiv_math: {root} holds split {split!r} twice, as {' and '.join(found)}: keep one")
    return sorted(root.glob(found[0]), key=lambda path: ([int(n) for n in re.findall(r"\d+", path.name)], path))


def _config(document: str, record: Mapping[str, Any]) -> str:
    """The config of a line. `meta` is an object in proof-pile's files, and JSON text in copies by its loader."""
    meta = record.get("meta")
    try:
        meta = json.loads(meta) if isinstance(meta, str) else meta
    except ValueError:
        meta = None
    if not isinstance(meta, Mapping):
        raise UserError(f'arxiv_math: {document}: no "meta" that is a JSON object: mend or delete the line')
    return str(meta.get("config") or "none")
