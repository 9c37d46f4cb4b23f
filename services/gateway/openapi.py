"""This API's OpenAPI document: every field that is read, every shape that is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway import sse
from services.gateway.fields import HARMLESS, UNSUPPORTED
from services.gateway.requests import Body, ChatBody, TextBody
from services.gateway.shape_models import components

JSON = "application/json"
ANSWERS: dict[str, tuple[type[Body], str]] = {
    "/v1/chat/completions": (ChatBody, "ChatCompletion"),
    "/v1/completions": (TextBody, "TextCompletion"),
}
SHAPED = {
    "/v1/models": {"200": "Models"},
    "/v1/models/{name}": {"200": "Model"},
    "/health": {"200": "Health"},
    "/ready": {"200": "Ready", "503": "NotReady"},
}
_ID = r"^(chatcmpl|cmpl)-[0-9a-f]{32}:[0-9]{1,9}\.[0-9]{1,9}(,[0-9]{1,9}\.[0-9]{1,9}){0,127}$"
_RESUME: dict[str, Any] = {
    "name": sse.HEADER,
    "in": "header",
    "description": "The id of the last event of this answer that the client has.",
    "schema": {"type": "string", "pattern": _ID},
}
_QUERY: list[dict[str, Any]] = [
    {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}},
    {"name": "include_usage", "in": "query", "required": False, "schema": {"enum": ["true", "false"]}},
]


def document(app: FastAPI) -> dict[str, Any]:
    """What `/openapi.json` has. Made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        made["components"] = {"schemas": components(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _describe(path, method, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _describe(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    responses |= {status: _response("An error.", {JSON: _ref("Error")}) for status in ("4XX", "5XX")}
    for status, shape in SHAPED.get(path, {}).items():
        responses[status] = _response("See the schema.", {JSON: _ref(shape)})
    if path == "/metrics":
        responses["200"] = _response("Prometheus.", {"text/plain": {"type": "string"}})
    if path.startswith("/v1/") or path == "/fleet":
        operation["security"] = [{"key": []}, {}]
    if path not in ANSWERS:
        return
    body, shape = ANSWERS[path]
    events = {"type": "string", "description": f"Events with a {shape}Chunk each, or one Error; then [DONE]."}
    content: dict[str, Any] = {"text/event-stream": events}
    if method == "post":
        content = {JSON: _ref(shape), **content}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body_schema(body)}}}
        operation["parameters"] = [{**_RESUME, "required": False}]
    else:
        operation["parameters"] = [{**_RESUME, "required": True}, *_QUERY]
    responses["200"] = _response("The answer; as events with stream: true.", content)


def body_schema(body: type[Body]) -> dict[str, Any]:
    """The fields that act, and those that are taken though they do not: with the values with which they are taken.

    `null` is the same as unset, everywhere but in what is needed.
    """
    schema = body.model_json_schema()
    own: dict[str, Any] = schema["properties"]
    others: dict[str, dict[str, Any]] = {name: {} for name in HARMLESS}
    others |= {name: _one_of(plain) for name, plain in UNSUPPORTED.items()}
    properties = {name: others[name] for name in sorted(others)} | own
    for name in properties.keys() - set(schema["required"]):
        if properties[name] != {"type": "null"}:
            properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    return {**schema, "properties": properties, "additionalProperties": False}


def _one_of(values: Sequence[Any]) -> dict[str, Any]:
    distinct = [value for index, value in enumerate(values) if value not in values[:index]]
    return {"enum": distinct} if distinct else {"type": "null"}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _response(told: str, content: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"description": told, "content": {kind: {"schema": schema} for kind, schema in content.items()}}
