"""A W&B server on this machine that can refuse the key, or disappear."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
