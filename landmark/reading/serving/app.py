"""The application: OpenAI's completions and chat completions, with documents."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from landmark.documents import EncodingError
from landmark.reading.answering import Gone
from landmark.reading.serving import page, responses
from landmark.reading.serving.memories import Failed, Full, Missing, ServerSettings
from landmark.reading.serving.openai_responses import Asking, Responded
from landmark.reading.serving.page import fields
from landmark.reading.serving.progress import SILENCE, Progress
from landmark.reading.serving.requests import Asked, Chat, Completion
from landmark.reading.serving.service import Service
from landmark.utils.errors import UserError

OPEN = "/health", "/docs", "/openapi.json", *page.FILES  # for everybody
PART = 1 << 16  # most characters of a document's text in a response


def make_app(model: Any, tokenizer: Any, settings: ServerSettings, name: str = "landmark") -> FastAPI:
    """The application. name: of the model, for clients, which send `Authorization: Bearer KEY`. A text that begins as
    one that the same key sent before is read from there on. A request may have `document`, a name to which a text was
    put at /v1/documents: the prompt is read after it.
    """
    service = Service(model, tokenizer, settings, name)

    @asynccontextmanager
    async def while_it_serves(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.requests
        yield
        service.close()

    app = FastAPI(title="landmark", docs_url=None, redoc_url=None, lifespan=while_it_serves)
    app.state.service = service
    app.add_middleware(Guard, settings=settings)
    # Pages of any origin may ask: they must know a key. It stands before the guard, because preflights have no key.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    answer_errors(app)
    app.include_router(routes)
    app.include_router(page.routes)
    app.include_router(fields.routes)
    return app


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _client(request: Request) -> str:
    """The key of a request: Guard had answered without one."""
    return str(key_of(request.headers, request.app.state.service.settings.keys))


Serving = Annotated[Service, Depends(_service)]
Client = Annotated[str, Depends(_client)]
routes = APIRouter()


@routes.get("/health")
async def health() -> dict[str, str]:
    """Whether the server runs; needs no key."""
    return {"status": "ok"}


# Answered without a thread, while all threads have requests that wait for the model.
@routes.get("/v1/models")
async def models(service: Serving) -> dict[str, Any]:
    """The one model."""
    return {"object": "list", "data": [_described(service)]}


@routes.get("/v1/models/{asked:path}")
async def retrieve_model(asked: str, service: Serving) -> dict[str, Any]:
    """The model, by its name."""
    service.check_model(asked)
    return _described(service)


def _described(service: Service) -> dict[str, Any]:
    described = {"id": service.names[0], "object": "model", "created": 0, "owned_by": "landmark"}
    return described | {"sources": service.finds_sources}


@routes.post("/v1/completions")
async def completions(asked: Completion, service: Serving, client: Client, request: Request) -> Any:
    """What follows a text."""
    return await _complete(asked, service, client, request)


@routes.post("/v1/chat/completions")
async def chat_completions(asked: Chat, service: Serving, client: Client, request: Request) -> Any:
    """The answer to messages."""
    return await _complete(asked, service, client, request)


@routes.post("/v1/responses")
async def respond(asked: Asking, service: Serving, client: Client, request: Request) -> Any:
    """The answer to messages, in OpenAI's newer form."""
    return await _complete(asked, service, client, request)


async def _complete(asked: Asked, service: Service, client: str, request: Request) -> Any:
    progress = service.progress("a prompt")

    def complete() -> Any:
        response = service.complete(asked, client, progress)
        response = Responded(response, asked) if isinstance(asked, Asking) else response
        if not asked.stream:
            return response.whole()
        events = response.events(bool((asked.stream_options or {}).get("include_usage")))
        return Stream(progress, events, response.deltas)

    return await while_connected(request, progress, complete)


@routes.put("/v1/documents/{name}")
async def put_document(
    name: str,
    service: Serving,
    client: Client,
    request: Request,
    stream: bool = False,
    wait: bool = True,
    encoding: str | None = None,
) -> Any:
    """The body is the file itself, text or one of `landmark.documents`; the document has the name that is given.
    stream: the answer is a stream of events, which say how far the text is read; the last one is the document.
    wait: false: the answer comes at once, and the text is read whether its client stays or not (/v1/readings).
    encoding: of a text; where it is not sure, the error has `encodings` that may be, each with a sample of its text.
    """
    with service.memories.upload() as file:
        async for part in request.stream():
            await run_in_threadpool(file.write, part)
        document = await run_in_threadpool(service.document_in, file, name, encoding)
    progress = service.progress(f"document {name}")
    add = lambda: service.add_document(client, name, document, progress)  # noqa: E731
    if not wait:
        service.readings.start(client, name, progress, add)
        return JSONResponse({"id": name, "object": "document.reading", "read": 0, "tokens": 0}, 202)
    if stream:
        return Stream(progress, responses.events_of(add), is_document=True)
    return await while_connected(request, progress, add)


# Answered without a thread, as the models.
@routes.get("/v1/readings")
async def list_readings(service: Serving, client: Client) -> dict[str, Any]:
    """The texts that are being read since `wait=false`: how far each is. One that could not be read has an error."""
    return {"object": "list", "data": service.readings.list(client)}


@routes.delete("/v1/readings/{name}")
async def stop_reading(name: str, service: Serving, client: Client) -> dict[str, Any]:
    """End a reading, or dismiss its error."""
    service.readings.stop(client, name)
    return {"id": name, "object": "document.reading", "deleted": True}


@routes.get("/v1/documents")
def list_documents(service: Serving, client: Client) -> dict[str, Any]:
    """The documents of the request's key."""
    found = service.memories.list(client)
    listed = [{"id": id, "object": "document", "tokens": tokens} for id, tokens in found.items()]
    return {"object": "list", "data": [each | service.warnings(client, each["id"]) for each in listed]}


@routes.get("/v1/documents/{name}/text")
def document_text(
    name: str,
    service: Serving,
    client: Client,
    start: Annotated[int, Query(ge=0)] = 0,
    end: Annotated[int | None, Query(ge=0)] = None,
) -> dict[str, Any]:
    """The characters of a document's text from start to end, of which a response has at most 65,536."""
    text = service.document_text(client, name)
    end = min(len(text), start + PART, len(text) if end is None else end)
    part = {"start": min(start, end), "end": end, "length": len(text), "text": text[start:end]}
    return {"id": name, "object": "document.text", **part}


@routes.delete("/v1/documents/{name}")
def delete_document(name: str, service: Serving, client: Client) -> dict[str, Any]:
    """Forget a document."""
    service.memories.delete(client, name)
    return {"id": name, "object": "document", "deleted": True}


class Stream(StreamingResponse):
    """Server-sent events. Its headers go at once; where there is no event for a while, a comment says how far the text
    is read. Where the client goes away, nothing more is computed, and the memory that answers is free again at once.
    """

    def __init__(self, progress: Progress, events: Generator[str], *others: Generator[Any], is_document: bool = False):
        """others: generators from which the events are made. is_document: progress is an event of its own."""
        super().__init__(self._with_signs_of_life(), media_type="text/event-stream", headers=_NO_BUFFERS)
        self._progress, self._events, self._generators = progress, events, (events, *others)
        self._is_document = is_document
        self._next: asyncio.Future[str | None] | None = None

    async def _with_signs_of_life(self) -> AsyncIterator[str]:
        while True:
            self._next = following = asyncio.ensure_future(run_in_threadpool(next, self._events, None))
            while not (await asyncio.wait({following}, timeout=min(SILENCE, 1) if self._is_document else SILENCE))[0]:
                yield responses.progress(self._progress.read, self._progress.tokens, self._is_document)
            if (event := following.result()) is None:
                return
            yield event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._progress.gone.set()
            with anyio.CancelScope(shield=True):
                if self._next is not None:
                    await asyncio.wait({self._next})
                for each in self._generators:
                    await run_in_threadpool(each.close)


_NO_BUFFERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def while_connected(request: Request, progress: Progress, work: Callable[[], Any]) -> Any:
    """Do work in a thread. `progress.gone` is set where the request's client leaves before the work is done."""
    result, failure = None, None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        progress.gone.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            result = await run_in_threadpool(work)
        except Exception as raised:  # a group of tasks would wrap it
            failure = raised
        except BaseException:  # the server stops
            progress.gone.set()
            raise
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def answer_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, each with one line."""

    @app.exception_handler(UserError)
    def refuse(_: Request, raised: UserError) -> JSONResponse:
        status = {Missing: 404, Full: 507, Failed: 500}.get(type(raised), 400)
        said = responses.error(str(raised), "server_error" if status >= 500 else "invalid_request_error")
        if isinstance(raised, EncodingError):
            said["error"]["encodings"] = [each._asdict() for each in raised.guesses]
        return JSONResponse(said, status)

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
    def leave(request: Request, _: Gone) -> Response:
        if request.app.state.service.stopped:
            return JSONResponse(responses.error(responses.STOPS, "server_error"), 503)
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
    """Answers before the body is read: 401 to a request without a key, 413 to a body that is larger than the limit of
    requests, or of files that become documents. A body of unknown length is counted while it comes.
    """

    def __init__(self, app: Any, settings: ServerSettings):
        self._app, self._settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        headers, refused = Headers(scope=scope), None
        limit = "file" if scope["method"] == "PUT" else "body"
        most = getattr(self._settings, limit)
        too_large = f"the request has more than {most:,} bytes: the server's --{limit} allows no more"
        if key_of(headers, self._settings.keys) is None:
            said = responses.error("the API key is missing or wrong", "authentication_error", "invalid_api_key")
            refused = JSONResponse(said, 401)
        elif int(headers.get("content-length", 0)) > most:
            refused = JSONResponse(responses.error(too_large), 413)
        received = 0

        async def counted() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, too_large)
            return message

        await (refused or self._app)(scope, receive if refused else counted, send)
