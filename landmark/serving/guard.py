"""What comes before and around all requests: keys, sizes of bodies, clients that leave, and errors."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from landmark.serving.answering import Gone
from landmark.serving.memories import Busy, Failed, Full, Missing
from landmark.serving.responses import error
from landmark.utils.errors import UserError

CLIENT_LEFT = 499  # nobody reads it


async def while_connected(request: Request, work: Callable[[threading.Event], Any]) -> Any:
    """Do work in a thread. It gets an event that is set where the request's client leaves before the work is done."""
    gone, result, failure = threading.Event(), None, None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            result = await run_in_threadpool(work, gone)
        except Exception as raised:  # a group of tasks would wrap it
            failure = raised
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def answer_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, each with one line."""

    @app.exception_handler(UserError)
    def refuse(_: Request, raised: UserError) -> JSONResponse:
        status = {Missing: 404, Busy: 409, Full: 507, Failed: 500}.get(type(raised), 400)
        return JSONResponse(error(str(raised), "server_error" if status >= 500 else "invalid_request_error"), status)

    @app.exception_handler(HTTPException)
    def refuse_request(_: Request, raised: HTTPException) -> JSONResponse:
        return JSONResponse(error(str(raised.detail)), raised.status_code, raised.headers)

    @app.exception_handler(RequestValidationError)
    def refuse_body(_: Request, raised: RequestValidationError) -> JSONResponse:
        one = raised.errors()[0]
        where = ".".join(map(str, one["loc"][1:]))
        return JSONResponse(error(f"{where}: {one['msg']}"), 400)

    @app.exception_handler(Gone)
    def leave(_: Request, __: Gone) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    def fail(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(error("the server failed", "server_error"), 500)


def key_of(headers: Headers, keys: Sequence[str]) -> str | None:
    """The key that a request has; None: none of them."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    same = (each for each in keys if hmac.compare_digest(given.encode("latin-1"), each.encode()))
    return next(same, None) if scheme.lower() == "bearer" else None


class Guard:
    """Answers 401 to a request without a key, before its body is read, and 413 to a body of more than `most` bytes."""

    def __init__(self, app: Any, keys: Sequence[str], most: int):
        self._app, self._keys, self._most = app, keys, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if key_of(Headers(scope=scope), self._keys) is None:
            refused = error("the API key is missing or wrong", "authentication_error", "invalid_api_key")
            await JSONResponse(refused, 401)(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                said = error(f"the request has more than {self._most:,} bytes")
                await JSONResponse(said, 413)(scope, receive, send)
                return
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Any:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)
