"""The application: OpenAI's completions and chat completions, with documents."""

import hmac
import itertools
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
import torch
from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from landmark.serving import responses
from landmark.serving.answering import Answer, Answering, Gone, Piece, Sampling
from landmark.serving.memories import Failed, Full, Memories, Missing, ServerSettings
from landmark.serving.requests import Asked, Chat, Completion
from landmark.utils.chats import Separation
from landmark.utils.errors import UserError

OPEN = "/health", "/docs", "/openapi.json"  # for everybody


def make_app(model: Any, tokenizer: Any, settings: ServerSettings, name: str = "landmark") -> FastAPI:
    """The application. name: of the model, for clients, which send `Authorization: Bearer KEY`. A text that begins as
    one that the same key sent before is read from there on. A request may have `document`, a name to which a text was
    put at /v1/documents: the prompt is read after it.
    """
    answering, memories = Answering(model, tokenizer, settings.reuse), Memories(settings, model)
    described = {"id": name, "object": "model", "created": 0, "owned_by": "landmark"}

    @asynccontextmanager
    async def while_it_serves(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.requests
        yield
        memories.close()

    app = FastAPI(title="landmark", redoc_url=None, lifespan=while_it_serves)
    app.add_middleware(Guard, keys=settings.keys, most=settings.body)
    # Pages of any origin may ask: they must know a key. It stands before the guard, because preflights have no key.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    answer_errors(app)

    async def key(request: Request) -> str:
        return str(key_of(request.headers, settings.keys))  # or Guard had answered

    def complete(asked: Asked, client: str, gone: threading.Event) -> Any:
        """The response to a request; of a stream, where its first token is there."""
        if asked.model not in (None, "", name):
            raise _no_model(asked.model)
        is_chat = isinstance(asked, Chat)
        document = [] if asked.document is None else memories.ids(client, asked.document)
        ids, chats, counts = [*document, *_prompt(asked, not document)], answering.chats, list[int]()
        answer = Answer(Separation(chats if is_chat else None, is_chat and chats.opens_reasoning(ids)))
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        pieces = _pieces(asked, client, len(document), ids, answer, counts, gone)
        first = next(pieces)  # errors before the first token have a status of their own
        every = itertools.chain([first], pieces)
        response = responses.Response(every, answer, counts, head, is_chat)
        if not asked.stream:
            return response.whole()
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        return _Stream(response.events(with_usage), pieces)

    def _pieces(
        asked: Asked,
        client: str,
        document: int,
        ids: list[int],
        answer: Answer,
        counts: list[int],
        gone: threading.Event,
    ) -> Generator[Piece]:
        """Pieces of the answer. document: ids that begin the prompt. counts: gets its tokens, all and known."""
        most = min(asked.most or settings.tokens, settings.tokens)
        stop = [each for each in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if each]
        drawing = asked.top_p, max(0, asked.top_k), asked.min_p, asked.repetition_penalty
        sampling = Sampling(most, asked.temperature, *drawing, stop)
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if asked.seed is None else asked.seed)
        if asked.document is not None and answering.prefixes.longest(ids, client) < document:
            answering.prefixes.add(memories.memory(client, asked.document), client)
        with answering.prefixes.using(ids, client) as cache:
            counts += [len(ids), cache.get_seq_length()]
            yield from answering.answer(ids, cache, answer, sampling, generator, gone)

    def _prompt(asked: Asked, begins: bool) -> list[int]:
        """The ids of the prompt. begins: no document comes before it."""
        if isinstance(asked, Completion):
            return answering.ids(asked.prompt, begins)
        assert isinstance(asked, Chat)
        messages = [message.as_dict() for message in asked.messages]
        return answering.chats.ids(messages, begins, **asked.chat_template_kwargs)

    def _no_model(asked: str) -> Missing:
        return Missing(f"there is no model {asked}: this server has {name}")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    # Answered without a thread, while all threads have requests that wait for the model.
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{asked:path}")
    async def retrieve_model(asked: str) -> dict[str, Any]:
        if asked != name:
            raise _no_model(asked)
        return described

    @app.post("/v1/completions")
    async def completions(asked: Completion, client: Annotated[str, Depends(key)], request: Request) -> Any:
        return await while_connected(request, lambda gone: complete(asked, client, gone))

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: Chat, client: Annotated[str, Depends(key)], request: Request) -> Any:
        return await while_connected(request, lambda gone: complete(asked, client, gone))

    @app.put("/v1/documents/{name}")
    async def put_document(name: str, client: Annotated[str, Depends(key)], request: Request) -> dict[str, Any]:
        """The body is the text itself; the document has the name that is given."""
        try:
            text = (await request.body()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"the document is not text in UTF-8 ({error.reason} at byte {error.start})") from error

        def add(gone: threading.Event) -> dict[str, Any]:
            ids = answering.chats.text_ids(text)
            answering.ids(ids)  # or they are refused
            memories.check_room(client, name, answering.bytes_of(len(ids)))
            with answering.prefixes.using(ids, client) as cache:
                answering.read(ids[cache.get_seq_length() :], cache, gone)
                memories.save(client, name, cache)
            return {"id": name, "object": "document", "tokens": len(ids)}

        return await while_connected(request, add)

    @app.get("/v1/documents")
    def list_documents(client: Annotated[str, Depends(key)]) -> dict[str, Any]:
        found = memories.list(client).items()
        return {"object": "list", "data": [{"id": id, "object": "document", "tokens": tokens} for id, tokens in found]}

    @app.delete("/v1/documents/{name}")
    def delete_document(name: str, client: Annotated[str, Depends(key)]) -> dict[str, Any]:
        memories.delete(client, name)
        return {"id": name, "object": "document", "deleted": True}

    return app


class _Stream(StreamingResponse):
    """The events of a streamed answer. Where the client goes away, the memory that answers is free again at once."""

    def __init__(self, events: Generator[str], pieces: Generator[Piece]):
        super().__init__(events, media_type="text/event-stream")
        self._generators = events, pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                for each in self._generators:
                    await run_in_threadpool(each.close)


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
        status = {Missing: 404, Full: 507, Failed: 500}.get(type(raised), 400)
        return JSONResponse(
            responses.error(str(raised), "server_error" if status >= 500 else "invalid_request_error"), status
        )

    @app.exception_handler(HTTPException)
    def refuse_request(_: Request, raised: HTTPException) -> JSONResponse:
        return JSONResponse(responses.error(str(raised.detail)), raised.status_code, raised.headers)

    @app.exception_handler(RequestValidationError)
    def refuse_body(_: Request, raised: RequestValidationError) -> JSONResponse:
        one = max(raised.errors(), key=lambda each: len(each["loc"]))  # of several types that a field may have
        where = ".".join(str(part) for part in one["loc"][1:] if "[" not in str(part))
        said = one["msg"].removeprefix("Value error, ")
        if one["type"] == "json_invalid":
            said = f"the body is no JSON: {one['ctx']['error']} at character {where}"
        elif where:
            said = f"{where}: {said}"
        return JSONResponse(responses.error(said), 400)

    @app.exception_handler(Gone)
    def leave(_: Request, __: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    def fail(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(responses.error("the server failed", "server_error"), 500)


def key_of(headers: Headers, keys: Sequence[str]) -> str | None:
    """The key that a request has; None: none of them."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    same = (each for each in keys if hmac.compare_digest(given.encode("latin-1"), each.encode()))
    return next(same, None) if scheme.lower() == "bearer" else None


class Guard:
    """Answers before the body is read: 401 to a request without a key, 413 to a body of more than `most` bytes, or of
    unknown length.
    """

    def __init__(self, app: Any, keys: Sequence[str], most: int):
        self._app, self._keys, self._most = app, keys, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = None
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = Headers(scope=scope)
            if key_of(headers, self._keys) is None:
                said = responses.error("the API key is missing or wrong", "authentication_error", "invalid_api_key")
                refused = JSONResponse(said, 401)
            elif "transfer-encoding" in headers or int(headers.get("content-length", 0)) > self._most:
                said = f"the request has more than {self._most:,} bytes, or does not say how many (Content-Length)"
                refused = JSONResponse(responses.error(said), 413)
        await (refused or self._app)(scope, receive, send)
