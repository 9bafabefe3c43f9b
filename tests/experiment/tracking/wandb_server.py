"""A W&B server on this machine that can refuse the key, or disappear; and the runs that W&B keeps offline."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from landmark.experiment.tracking.wandb_files import records

ENTITY = {"id": "e", "name": "entity"}
PROJECT = {"id": "p", "name": "project", "entity": ENTITY}
RUN = {"id": "r", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0, "project": PROJECT}


class Server(ThreadingHTTPServer):
    """`history`: all lines of metrics uploaded. `artifacts_used`: number of times that a run used an artifact."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.refuses_the_key = False
        self.history: list[dict[str, Any]] = []
        self.artifacts_used = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that closes its connection is not an error."""

    def go_away(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses_the_key:
            return self._answer(401, {"errors": [{"message": "no such key"}]})
        if self.path == "/graphql":
            return self._answer(200, {"data": self._data(json.loads(body))})
        if self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            lines = files.get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, lines)
        return self._answer(200, {})

    do_PUT = do_GET = do_POST

    def _data(self, asked: dict[str, Any]) -> dict[str, Any]:
        query, variables = asked["query"], asked.get("variables") or {}
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": RUN, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "ArtifactType" in query:  # none of this name yet
            return {"project": None}
        if "createArtifact" in query:
            made = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if "useArtifact" in query:
            self.server.artifacts_used += 1
            return {"useArtifact": {"artifact": {"id": "a"}}}
        if "bucket" in query:
            return {"model": {**PROJECT, "bucket": self._resumed() if "historyTail" in query else None}}
        return {"viewer": {"id": "v", "entity": "entity", "username": "u", "flags": "{}", "teams": {"edges": []}}}

    def _resumed(self) -> dict[str, Any] | None:
        """What W&B's client asks of a run that it resumes; None where there is none."""
        history = self.server.history
        if not history:
            return None
        counts = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(history)}
        tail = {"historyTail": json.dumps([json.dumps(history[-1])]), "eventsTail": "[]", "summaryMetrics": "{}"}
        return {**RUN, **counts, **tail, "wandbConfig": '{"t": 1}'}

    def _answer(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


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
    for record in records(path):
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


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
