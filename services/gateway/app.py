"""The HTTP API: OpenAI's, and what operators ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import structlog
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

from services.gateway import body, sse
from services.gateway.gateway import Gateway
from services.gateway.keys import Caller
from services.gateway.openapi import document
from services.gateway.problems import Problem, problem_of
from services.gateway.requests import Call, Choice, Kind, chat_call, text_call
from services.gateway.views import add_views
from shared.errors import InvalidField, TrineError

SMALL = 1 << 16
"""A larger body is read in a thread of its own: other requests go on meanwhile."""
log = structlog.get_logger()


def create_app(gateway: Gateway) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        yield
        await gateway.close()

    app = FastAPI(title="Trine", version="1", lifespan=life, docs_url=None, redoc_url=None)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(TrineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    _add_answers(app, gateway, Kind.CHAT, "/v1/chat/completions")
    _add_answers(app, gateway, Kind.TEXT, "/v1/completions")
    _add_models(app, gateway)
    _add_operations(app, gateway)
    add_views(app, gateway)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def _add_answers(app: FastAPI, gateway: Gateway, kind: Kind, path: str) -> None:
    @app.post(path, response_model=None)
    async def ask(request: Request) -> Response:
        """A `Last-Event-ID` header goes on with an answer that was asked for with the same body."""
        with _counted(gateway):
            caller = _caller(gateway, request)
            call = await _call(gateway, kind, request)
            if (last := request.headers.get(sse.HEADER)) is None:
                return await gateway.answer(call, caller, request.headers)
            base, positions = _resumed(last, kind)
            if len(positions) != len(call.choices) or not call.stream:
                raise InvalidField("Last-Event-ID: it is of a request with another body", field="last_event_id")
            return await gateway.resume(call, caller, base, positions)

    @app.get(path, response_model=None)
    async def go_on(request: Request) -> Response:
        """Goes on with a streamed answer, as EventSource does. Query: `model`, unless only one is served, and
        `include_usage=true`.
        """
        with _counted(gateway):
            caller = _caller(gateway, request)
            if (last := request.headers.get(sse.HEADER)) is None:
                raise Problem(405, "GET needs a Last-Event-ID; ask with POST", "method_not_allowed")
            base, positions = _resumed(last, kind)
            served = list(gateway.models())
            model = request.query_params.get("model") or (served[0] if len(served) == 1 else None)
            if model is None:
                raise InvalidField("model: several are served, or none; name it in the query", field="model")
            usage = request.query_params.get("include_usage") == "true"
            choices = tuple(Choice(0, {}) for _ in positions)
            return await gateway.resume(Call(kind, model, choices, True, usage), caller, base, positions)


@contextmanager
def _counted(gateway: Gateway) -> Iterator[None]:
    """Counts a request that is refused before anything is sent; one that is sent counts itself."""
    try:
        yield
    except (Problem, TrineError) as error:
        problem = error if isinstance(error, Problem) else problem_of(error)
        gateway.metrics.requests.labels("", problem.code or "internal").inc()
        raise


def _caller(gateway: Gateway, request: Request) -> Caller:
    return gateway.keys.caller(request.headers.get("authorization"))


async def _call(gateway: Gateway, kind: Kind, request: Request) -> Call:
    settings = gateway.settings
    data = await body.read(request, settings.max_body_bytes, settings.read_s)

    def parsed() -> Call:
        given = body.parse(data, settings.max_depth)
        if kind is Kind.TEXT:
            return text_call(given, max_choices=settings.max_choices)
        return chat_call(given, max_messages=settings.max_messages, max_choices=settings.max_choices)

    return parsed() if len(data) <= SMALL else await asyncio.to_thread(parsed)


def _resumed(text: str, kind: Kind) -> tuple[str, list[sse.Position]]:
    base, positions = sse.parse_event_id(text)
    if not base.startswith(f"{kind.value}-"):
        raise InvalidField("Last-Event-ID: it is of the other kind of answers", field="last_event_id")
    return base, positions


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _caller(gateway, request)
        return {"object": "list", "data": [_model(*each) for each in gateway.models().items()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        _caller(gateway, request)
        found = gateway.models()
        if name not in found:
            told = f"no model {name!r:.140} is served here; running: {', '.join(found) or 'none'}"
            raise Problem(404, told, "model_not_found", param="model")
        return _model(name, found[name])


def _model(name: str, since: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(since), "owned_by": "trine"}


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process lives."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """Whether a request would be taken, and if not, why."""
        reason = gateway.trouble()
        if reason is None:
            return JSONResponse({"status": "ready", "models": list(gateway.models())})
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"retry-after": "1"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


# Errors


def _respond(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(problem.body, problem.status, {**problem.headers, **(headers or {})})


async def _on_problem(request: Request, error: Exception) -> Response:
    return _respond(cast("Problem", error))


async def _on_error(request: Request, error: Exception) -> Response:
    return _respond(problem_of(cast("TrineError", error)))


async def _on_http(request: Request, error: Exception) -> Response:
    """What Starlette finds itself: no such path, another method."""
    found = cast("HTTPException", error)
    code = {404: "not_found", 405: "method_not_allowed"}.get(found.status_code, "bad_request")
    told = f"{request.method} {request.url.path[:200]}: {found.detail}"
    return _respond(Problem(found.status_code, told, code), dict(found.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request handler failed", path=request.url.path[:200], exc_info=error)
    return _respond(Problem(500, "internal error in the gateway", "internal"))
