"""arXiv Math: the papers in proof-pile, whose JSON lines name the config of each document in `meta`."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from landmark.data.sources import SPLITS, Document, Source, existing_folder, fingerprint, numbered_lines
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
_NO_CONFIG = "none"

_log = logging.getLogger(__name__)


class Line(NamedTuple):
    """A line of a file. number: from 1. content: its bytes, or its parsed columns `text` and `meta`."""

    file: str
    number: int
    content: bytes | Mapping[str, Any]


class ArxivMath(Source):
    """Documents are lines `{"text": …, "meta": {"config": …}}`.

    files: the lines. configs: configs whose documents are taken (None: all). bad_lines: for a line of another form
    "stop" raises a UserError that names it, "skip" leaves it out and counts it.
    """

    name = "arxiv_math"

    def __init__(
        self, files: "LocalFiles | HubFiles", configs: Sequence[str] | None, bad_lines: Literal["stop", "skip"]
    ):
        self._files = files
        self._configs = None if configs is None else sorted(set(configs))
        self._skip = bad_lines == "skip"
        self._reports: dict[str, dict[str, Any]] = {}
        self.origin = files.origin
        choice = {"configs": self._configs, "bad_lines": bad_lines}
        self.identity = {"corpus": self.name, **choice, **files.identity}

    def documents(self, split: str) -> Iterator[Document]:
        found: Counter[str] = Counter()
        report = self._reports[split] = {"configs": found, "skipped_lines": 0}
        for file, number, content in self._files.lines(split):
            try:
                text, config = _parse(content)
            except _BadLine as error:
                self._bad_line(f"{file}, line {number}: {error}", report)
                continue
            found[config] += 1
            if self._configs is None or config in self._configs:
                yield Document(f"{file}:{number}", text)
        if report["skipped_lines"]:
            _log.warning("%s: lines of split %s that were skipped: %d", self.name, split, report["skipped_lines"])
        if self._configs is not None and not found.keys() & set(self._configs):
            names = ", ".join(sorted(found)) or "no document at all"
            raise UserError(
                f"{self.name}: no document of split {split!r} of {self.origin} has a config among "
                f"data.configs=[{','.join(self._configs)}]: found {names}; name some of these, or take all (null)"
            )

    def _bad_line(self, problem: str, report: dict[str, Any]) -> None:
        if not self._skip:
            raise UserError(
                f"{self.name}: {problem}: mend or delete the line, or leave such lines out with data.bad_lines=skip"
            )
        if not report["skipped_lines"]:
            _log.warning("%s: %s: skipped; further such lines are skipped without a message", self.name, problem)
        report["skipped_lines"] += 1

    def report(self, split: str) -> dict[str, Any]:
        return self._reports.get(split, {})


class LocalFiles:
    """`<root>/<split>.jsonl`, or proof-pile's own layout, in which a split may have several numbered files."""

    def __init__(self, root: Path):
        self.origin = str(root)
        self._root = root
        self._paths = {split: self._split_files(root, split) for split in SPLITS}
        self.identity: dict[str, Any] = fingerprint(root, (path for split in SPLITS for path in self._paths[split]))

    @staticmethod
    def _split_files(root: Path, split: str) -> list[Path]:
        patterns = [pattern + suffix for pattern, suffix in product(_PATTERNS[split], ("", ".gz"))]
        found = [pattern for pattern in patterns if any(root.glob(pattern))]
        if not found:
            raise UserError(f"arxiv_math: {root} holds nothing for split {split!r}: expected {_LAYOUT}")
        if len(found) > 1:
            raise UserError(f"arxiv_math: {root} holds split {split!r} twice, as {' and '.join(found)}: keep one")
        return sorted(root.glob(found[0]), key=lambda path: ([int(n) for n in re.findall(r"\d+", path.name)], path))

    def lines(self, split: str) -> Iterator[Line]:
        for path in self._paths[split]:
            for number, content in numbered_lines("arxiv_math", path):
                yield Line(path.relative_to(self._root).as_posix(), number, content)


class HubFiles:
    """proof-pile on the Hugging Face hub, read as JSON files, because its loader script no longer runs.

    The files are read over the network while the corpus is prepared; only the prepared streams are kept on disk.
    """

    origin = HUB_NAME

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {"hub": HUB_NAME}

    def lines(self, split: str) -> Iterator[Line]:
        import datasets

        columns = datasets.Features({"text": datasets.Value("string"), "meta": datasets.Value("string")})
        for file in HUB_FILES[split]:
            number = 0
            try:
                rows = datasets.load_dataset(
                    "json",
                    data_files=f"hf://datasets/{HUB_NAME}/{file}",
                    split="train",
                    streaming=True,
                    features=columns,
                    chunksize=1,  # a line at a time, because the keys of `meta` and their types differ
                )
                for number, row in enumerate(rows, 1):
                    yield Line(file, number, row)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                raise UserError(
                    f"arxiv_math: {HUB_NAME}: {file} could not be read from line {number + 1} on "
                    f"({type(error).__name__}: {reason}): try again; or set data.path to a local copy, "
                    "where data.bad_lines=skip leaves out lines that are not JSON"
                ) from error


def make_source(
    path: Path | None, configs: Sequence[str] | None = ("arxiv",), bad_lines: Literal["stop", "skip"] = "stop"
) -> ArxivMath:
    """proof-pile, or some of its configs, from the Hugging Face hub or a local folder.

    Raises UserError for a missing folder, a split without files or with files of two kinds, and an empty `configs`.
    """
    if configs is not None and not configs:
        raise UserError("data.configs=[]: name at least one config (null: all)")
    files = HubFiles() if path is None else LocalFiles(existing_folder(path, _LAYOUT))
    return ArxivMath(files, configs, bad_lines)


class _BadLine(Exception):
    """A line of another form than expected; the message says why."""


def _parse(content: bytes | Mapping[str, Any]) -> tuple[str, str]:
    """Text and config of a line. `meta` is an object in proof-pile's files, and JSON text in copies by its loader."""
    record = _json(content, "the line") if isinstance(content, bytes) else content
    if not isinstance(record, Mapping) or not isinstance(text := record.get("text"), str):
        raise _BadLine('no JSON object with a "text"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine("the text holds half a surrogate pair") from None
    meta = record.get("meta")
    if isinstance(meta, str):
        meta = _json(meta, "its meta")
    if not isinstance(meta, Mapping):
        raise _BadLine('no "meta" that is a JSON object')
    return text, str(meta.get("config") or _NO_CONFIG)


def _json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"{what} is not JSON ({error})") from None
