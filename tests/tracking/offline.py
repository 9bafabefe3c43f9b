"""Read the file of an offline W&B run: records of protobuf in the frames of LevelDB's log."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK, FRAME = 7, 32768, 7
WHOLE, LAST = 1, 4  # kinds of a frame that end a record


@dataclass
class OfflineRun:
    """config: by dotted keys. history, summary: by metric. used, logged: artifacts by name."""

    identity: str = ""
    group: str = ""
    job_type: str = ""
    began: int = 0  # nanoseconds
    exit_code: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    used: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> set[str]:
        return {key for line in self.history for key in line} | set(self.summary)

    def series(self, key: str) -> list[Any]:
        return [line[key] for line in self.history if key in line]


def read_offline(folder: Path) -> list[OfflineRun]:
    """The runs below `folder`/wandb as they began. W&B's service may still be writing: it gets 30 s to end each."""
    runs = []
    for _ in range(60):
        runs = [_read(path) for path in folder.glob("wandb/offline-run-*/*.wandb")]
        runs.sort(key=lambda run: run.began)
        if all(run.exit_code is not None for run in runs):
            break
        time.sleep(0.5)
    return runs


def _read(path: Path) -> OfflineRun:
    run = OfflineRun()
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.began = record.run.start_time.ToNanoseconds()
            run.identity, run.group, run.job_type = record.run.run_id, record.run.run_group, record.run.job_type
            run.config = _flat({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "history":
            run.history.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "summary":
            run.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "artifact":
            kept = run.used if record.artifact.use_after_commit else run.logged
            kept[record.artifact.name] = record.artifact
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> Iterator[Any]:
    at, whole = HEADER, b""
    while at < len(data):
        if (left := BLOCK - at % BLOCK) < FRAME:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + FRAME : at + FRAME + length]
        at += FRAME + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
