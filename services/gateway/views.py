"""Routes of the page and of what it shows."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway import page_files
from services.gateway.gateway import Gateway
from services.gateway.problems import Problem


def add_views(app: FastAPI, gateway: Gateway) -> None:
    """`/` and `/page/NAME` ask for no key: there is nothing in them. `/fleet` does."""
    files = page_files.load()

    async def index(request: Request) -> Response:
        return files["index.html"].response(request)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise Problem(404, f"GET /page/{name[:100]}: Not Found", "not_found")
        return files[name].response(request)

    app.add_route("/", index, ["GET"], include_in_schema=False)
    app.add_route("/page/{name}", asset, ["GET"], include_in_schema=False)

    @app.get("/fleet", response_model=None)
    async def fleet(request: Request) -> JSONResponse:
        """The fleet, and the caller's own last answers, as the page at `/` shows them."""
        caller = gateway.keys.caller(request.headers.get("authorization"))
        return JSONResponse(gateway.overview(caller), headers={"cache-control": "no-store"})
