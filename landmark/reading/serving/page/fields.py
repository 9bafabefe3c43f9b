"""The page at `/docs`: the routes of the server and the fields of their bodies, as its OpenAPI schema has them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from landmark.reading.serving.page import HEADERS

routes = APIRouter(include_in_schema=False)


@routes.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Without scripts: those of another origin would run beside the page that keeps the key."""
    return HTMLResponse("\n".join(_lines(request.app.openapi())), headers=HEADERS)


def _lines(schema: dict[str, Any]) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8><title>landmark</title><link rel=stylesheet href=page.css>"
    yield '<main><h1>Requests</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>'
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(route.get('description', ''))}</p>"
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            kind = schema["components"]["schemas"].get(str(body.get("$ref", "")).rpartition("/")[2])
            fields = {each["name"]: {**each["schema"], **each} for each in route.get("parameters", ())}
            fields |= {} if kind is None else kind["properties"]
            yield "<dl>"
            for name, field in fields.items():
                default = f" = {field['default']}" if field.get("default") is not None else ""
                yield f"<dt><code>{escape(name)}: {escape(_type(field) + default)}</code></dt>"
                yield f"<dd>{escape(field.get('description', ''))}</dd>"
            yield "</dl>"
    yield "</main></html>"


def _type(field: dict[str, Any]) -> str:
    """As a reader of JSON calls it."""
    if kinds := field.get("anyOf"):
        return " or ".join(_type(each) for each in kinds if each.get("type") != "null")
    if "enum" in field:
        return " or ".join(field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    return str(field.get("type") or field.get("$ref", "anything").rpartition("/")[2])
