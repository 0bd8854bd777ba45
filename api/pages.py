"""The pages at `/docs` and `/redoc`: all that they load comes from this server, since its host may have no way out."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

ASSETS = "/docs/assets"
# Both are made of styles that scripts write; Redoc searches in a worker that it makes itself.
POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; worker-src 'self' blob:; "
    "script-src 'self' {scripts}; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""What the pages may do (CSP). They hold the key that somebody types in: nothing from elsewhere runs beside it."""
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def install(app: FastAPI) -> None:
    """Let `app` serve both pages, and what they are made of."""
    # The package is there for its copies of Swagger UI and Redoc, which it keeps up to date.
    app.mount(ASSETS, StaticFiles(directory=str(files("fastapi_offline") / "static")), name="docs")

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> RedirectResponse:
        """What somebody finds who opens the address alone."""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/docs")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        return _guarded(
            get_swagger_ui_html(
                openapi_url=f"{root}{app.openapi_url}",
                title=app.title,
                swagger_js_url=f"{root}{ASSETS}/swagger-ui-bundle.js",
                swagger_css_url=f"{root}{ASSETS}/swagger-ui.css",
                swagger_favicon_url=f"{root}{ASSETS}/favicon.png",
            )
        )

    @app.get("/redoc", include_in_schema=False)
    async def redoc(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        return _guarded(
            get_redoc_html(
                openapi_url=f"{root}{app.openapi_url}",
                title=app.title,
                redoc_js_url=f"{root}{ASSETS}/redoc.standalone.js",
                redoc_favicon_url=f"{root}{ASSETS}/favicon.png",
                with_google_fonts=False,
            )
        )


def _guarded(page: HTMLResponse) -> HTMLResponse:
    scripts = _INLINE.findall(bytes(page.body).decode())
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    page.headers["content-security-policy"] = POLICY.format(scripts=" ".join(f"'sha256-{hash_}'" for hash_ in hashes))
    return page
