"""The page at `/`: files that a server sends to everybody, without a key; what they ask for then needs one."""

from functools import partial
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FILES = {"/": "page.html", **{f"/{name}": name for name in ("page.css", "server.js", "page.js", "icon.svg")}}
# Nothing from elsewhere, nothing inline, and no text becomes HTML: a document may hold what an attacker wrote.
POLICY = "; ".join(
    (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'",
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "require-trusted-types-for 'script'; trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
routes = APIRouter(include_in_schema=False)


async def _send(name: str) -> FileResponse:
    return FileResponse(Path(__file__).with_name(name), headers=HEADERS)


for _path, _name in FILES.items():
    routes.add_api_route(_path, partial(_send, _name), methods=["GET", "HEAD"])
