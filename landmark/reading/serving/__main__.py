"""`python -m landmark.reading.serving MODEL`: serve a model to clients of OpenAI's protocol."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from landmark.reading.serving.memories import ServerSettings
from landmark.utils.collection import without_collection
from landmark.utils.errors import UserError
from landmark.utils.files import check_named, write_atomic
from landmark.utils.hardware import leave_busy_cores

DTYPES = "auto", "float32", "bfloat16", "float16"
LOOPBACK = "127.0.0.1", "localhost", "::1"
KEY = ".key"  # in the folder of documents, of a server that is given none
STOPPED = 10  # seconds after Ctrl-C in which running answers end: that of one step of the model


def main() -> None:
    """Serve until interrupted. The key of the clients is in the environment, LANDMARK_API_KEY; several with commas.
    Without one the server makes a key, listens on this machine alone, and prints the address that has it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m landmark.reading.serving",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="folder of a model, a .gguf file, or a name on the hub")
    parser.add_argument("--memories", type=Path, default=Path("memories"), help="folder of documents")
    parser.add_argument("--host", default="127.0.0.1", help="address at which clients ask")
    parser.add_argument("--port", type=int, default=8000, help="its port")
    parser.add_argument("--device", default="cpu", help="where the model computes, as cuda:0")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights; auto: as they are saved")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the weights of a folder; not given: as they are")
    parser.add_argument(
        "--landmarks", type=Path, help="file of landmarks that were learned from the model (task=teach)"
    )
    parser.add_argument("--gates", action="store_true", help="let them also weigh blocks")
    limits = [item for item in fields(ServerSettings) if item.metadata]
    for item in limits:
        choices, about = item.metadata.get("choices"), item.metadata["about"]
        said = {"type": str if choices else int, "choices": choices, "default": item.default, "help": about}
        parser.add_argument(f"--{item.name}", **said)
    given = parser.parse_args()
    try:
        keys = tuple(filter(None, map(str.strip, os.environ.get("LANDMARK_API_KEY", "").split(","))))
        check_named(given.model)
        is_made = not keys
        if is_made:
            keys = (_made_key(given.memories, given.host),)
        settings = ServerSettings(given.memories, keys, **{item.name: getattr(given, item.name) for item in limits})
        try:
            import uvicorn

            from landmark.reading.serving.app import make_app
        except ImportError as error:
            raise UserError(f"{error.name} is not installed: pip install 'landmark[serve]'") from error
        with without_collection():
            from landmark.models.huggingface import load, use_landmarks

            model, tokenizer = load(given.model, given.bits, device_map=given.device, dtype=given.dtype)
        if given.landmarks is not None:
            use_landmarks(model, given.landmarks, given.gates)
        if said := leave_busy_cores():
            print(said, file=sys.stderr)
        app = make_app(model, tokenizer, settings, given.model)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    logging.basicConfig(format="%(levelname)s:     %(message)s")
    logging.getLogger("landmark").setLevel(logging.INFO)
    server = uvicorn.Server(uvicorn.Config(app, given.host, given.port, timeout_graceful_shutdown=STOPPED))
    end = server.handle_exit

    def stop(sig: int, frame: Any) -> None:
        app.state.service.stop()  # or the server would wait for the answers that are made
        end(sig, frame)

    server.handle_exit = stop
    startup = server.startup

    async def start(sockets: Any = None) -> None:
        await startup(sockets)
        if server.started and is_made:
            print(f"open http://{given.host}:{given.port}/#key={keys[0]}", file=sys.stderr, flush=True)

    server.startup = start
    with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        server.run()


def _made_key(memories: Path, host: str) -> str:
    """The key of a server that is given none: made once, and kept beside what its clients have put in. Raises UserError
    for an address that other machines reach.
    """
    if host not in LOOPBACK:
        raise UserError(f"LANDMARK_API_KEY is not set: it is the key that clients send; --host={host} needs one")
    file = memories / KEY
    try:
        memories.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_atomic(file, secrets.token_urlsafe(24))
            file.chmod(0o600)
        if key := file.read_text("utf-8").strip():
            return key
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the key cannot be kept here ({error}): set LANDMARK_API_KEY") from error
    raise UserError(f"{file}: is empty: delete it, or set LANDMARK_API_KEY")


if __name__ == "__main__":
    main()
