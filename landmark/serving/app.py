"""The application: OpenAI's completions and chat completions, with sessions and documents."""

import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, Literal

import anyio
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers

from landmark.serving.answering import Answer, Answering
from landmark.serving.memories import Busy, Full, Memories, Missing
from landmark.serving.requests import Asked, Chat, Completion, Document
from landmark.serving.settings import ServerSettings
from landmark.utils.errors import UserError


def make_app(model: Any, tokenizer: Any, settings: ServerSettings, name: str = "landmark") -> FastAPI:
    """The application.

    Args:
        model: a model with landmarks.
        tokenizer: of transformers.
        settings: of the server.
        name: of the model, for clients.

    A client sends `Authorization: Bearer KEY`. Beside OpenAI's fields a request may have `session`, a name: the model
    reads the prompt (or the messages) after all that was read and said in this session before, so only what is new is
    sent; and `document`, the id that POST /v1/documents gave: the model reads the prompt after the document, which
    stays as it is. With both, a new session begins with the document.
    """
    answering, memories = Answering(model, tokenizer), Memories(settings, model)
    described = {"id": name, "object": "model", "created": 0, "owned_by": "landmark"}

    @asynccontextmanager
    async def while_it_serves(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.requests
        yield
        memories.close()

    app = FastAPI(title="landmark", docs_url=None, redoc_url=None, openapi_url=None, lifespan=while_it_serves)
    app.add_middleware(_Guarded, keys=settings.keys, most=settings.body)
    _answer_errors(app)

    async def key(request: Request) -> str:
        found = _key(request.headers, settings.keys)
        assert found is not None  # or _Guarded had answered
        return found

    def complete(asked: Asked, ids: list[int], client: str, kind: str) -> Any:
        answer = Answer(len(ids))
        pieces = _pieces(asked, ids, client, answer)
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        shape = _CHAT if kind == "chatcmpl" else _TEXT
        if not asked.stream:
            text = "".join(pieces)
            choice = {"index": 0, "finish_reason": answer.finish, "logprobs": None, **shape.whole(text)}
            return {**head, "object": shape.object, "choices": [choice], "usage": _usage(answer)}
        first = next(pieces, None)  # errors before the first token have a status of their own
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return _Stream(_events(first, pieces, answer, head, shape, with_usage), pieces)

    def _pieces(asked: Asked, ids: list[int], client: str, answer: Answer) -> Generator[str]:
        """Pieces of an answer; a session is saved before the last one is given, or not at all."""
        most = min(asked.max_tokens or asked.max_completion_tokens or settings.tokens, settings.tokens)
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        sampling = {"temperature": asked.temperature, "top_p": asked.top_p, "stop": [each for each in stop if each]}
        session = asked.session
        with memories.using(client, "sessions", session) if session is not None else nullcontext():
            if session is not None:
                cache = memories.open(client, "sessions", session, must_exist=False)
            else:
                cache = model.new_memory()
            if asked.document is not None:
                if cache.get_seq_length():
                    raise UserError(f"session {session} has begun: a document can only begin a new one")
                cache = memories.open(client, "documents", asked.document, must_exist=True)
            if session is not None and sampling["stop"]:
                raise UserError("stop: a session reads all that the model says; leave stop or session out")
            last = None
            for piece in answering.answer(ids, cache, answer, most=most, seed=asked.seed, **sampling):
                if last is not None:
                    yield last
                last = piece
            if session is not None:
                memories.save(client, "sessions", session, cache)
            if last is not None:
                yield last

    # Answered without a thread, while all threads have requests that wait for the model.
    @app.get("/v1/models")
    async def models(client: Annotated[str, Depends(key)]) -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str, client: Annotated[str, Depends(key)]) -> dict[str, Any]:
        if asked != name:
            raise Missing(f"there is no model {asked}: this server has {name}")
        return described

    @app.post("/v1/completions")
    def completions(asked: Completion, client: Annotated[str, Depends(key)]) -> Any:
        return complete(asked, answering.ids(asked.prompt), client, "cmpl")

    @app.post("/v1/chat/completions")
    def chat_completions(asked: Chat, client: Annotated[str, Depends(key)]) -> Any:
        ids = answering.chat_ids([message.as_dict() for message in asked.messages])
        return complete(asked, ids, client, "chatcmpl")

    @app.post("/v1/documents")
    def add_document(document: Document, client: Annotated[str, Depends(key)]) -> dict[str, Any]:
        ids, cache, name = answering.ids(document.text), model.new_memory(), uuid.uuid4().hex
        answering.read(ids, cache)
        memories.save(client, "documents", name, cache)
        return {"id": name, "object": "document", "tokens": len(ids)}

    @app.delete("/v1/{kind}/{name}")
    def delete(
        kind: Literal["sessions", "documents"], name: str, client: Annotated[str, Depends(key)]
    ) -> dict[str, Any]:
        with memories.using(client, kind, name):
            memories.delete(client, kind, name)
        return {"id": name, "object": kind[:-1], "deleted": True}

    return app


class _Stream(StreamingResponse):
    """The events of a streamed answer. Where the client goes away, the session that answers is free again at once."""

    def __init__(self, events: Generator[str], pieces: Generator[str]):
        super().__init__(events, media_type="text/event-stream")
        self._generators = events, pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                for each in self._generators:
                    await run_in_threadpool(each.close)


class _Shape:
    """How one kind of completion writes its text."""

    def __init__(self, object: str, chunk: str, whole: Callable[[str], Any], part: Callable[[str | None], Any]):
        self.object, self.chunk, self.whole, self.part = object, chunk, whole, part


_TEXT = _Shape("text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text or ""})
_CHAT = _Shape(
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {} if text is None else {"role": "assistant", "content": text}},
)


def _usage(answer: Answer) -> dict[str, int]:
    said = len(answer.tokens)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": said,
        "total_tokens": answer.prompt_tokens + said,
    }


def _events(
    first: str | None,
    pieces: Generator[str],
    answer: Answer,
    head: dict[str, Any],
    shape: _Shape,
    with_usage: bool,
) -> Generator[str]:
    """The server-sent events of a streamed answer; an error becomes an event too.

    Args:
        first: piece of the answer; None: it has no text.
        pieces: those after it.
        answer: is filled by `pieces`.
        head: what all events have.
        shape: of the completion.
        with_usage: whether a last event, without text, has the numbers of tokens; all others then have none, null.
    """
    usage = {"usage": None} if with_usage else {}

    def event(text: str | None, finish: str | None = None) -> str:
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **shape.part(text)}
        return data({**head, "object": shape.chunk, "choices": [choice], **usage})

    def data(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    try:
        if first is not None:
            yield event(first)
        for piece in pieces:
            yield event(piece)
        yield event(None, answer.finish)
        if with_usage:
            yield data({**head, "object": shape.chunk, "choices": [], "usage": _usage(answer)})
    except UserError as error:
        yield data(_error(str(error), "server_error"))
    except Exception:
        yield data(_error("the server failed", "server_error"))
        raise
    yield "data: [DONE]\n\n"


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _answer_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, each with one line."""

    @app.exception_handler(UserError)
    def refuse(_: Request, error: UserError) -> JSONResponse:
        status = {Missing: 404, Busy: 409, Full: 507}.get(type(error), 400)
        return JSONResponse(_error(str(error), "invalid_request_error"), status)

    @app.exception_handler(HTTPException)
    def refuse_client(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(_error(str(error.detail), "authentication_error"), error.status_code)

    @app.exception_handler(RequestValidationError)
    def refuse_body(_: Request, error: RequestValidationError) -> JSONResponse:
        one = error.errors()[0]
        where = ".".join(map(str, one["loc"][1:]))
        return JSONResponse(_error(f"{where}: {one['msg']}", "invalid_request_error"), 400)


def _key(headers: Headers, keys: Sequence[str]) -> str | None:
    """The key that a request has; None: none of them."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    same = (each for each in keys if hmac.compare_digest(given.encode("latin-1"), each.encode()))
    return next(same, None) if scheme.lower() == "bearer" else None


class _Guarded:
    """Answers 401 to a request without a key, before its body is read, and 413 to a body of more than `most` bytes."""

    def __init__(self, app: Any, keys: Sequence[str], most: int):
        self._app, self._keys, self._most = app, keys, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _key(Headers(scope=scope), self._keys) is None:
            refused = _error("the API key is missing or wrong", "authentication_error")
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
                said = _error(f"the request has more than {self._most:,} bytes", "invalid_request_error")
                await JSONResponse(said, 413)(scope, receive, send)
                return
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Any:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)
