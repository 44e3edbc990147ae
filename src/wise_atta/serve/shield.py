"""What is refused before anybody looks at it? Bodies without end, pages of other sites, and names of other hosts."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wise_atta.serve.config import is_loopback

# Bodies of all calls but /predict are small.
SMALL = 2**20
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Shield:
    """An ASGI layer around the application.

    Parameters
    ----------
    app
        What it protects.
    max_body
        Bytes that `/predict` may be sent.
    is_open
        Whether everybody is let in without a token: then a browser of this machine is the only thing between other
        sites and the service, and a name that somebody else's DNS resolves to this machine is no name of ours.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, is_open: Callable[[], bool]) -> None:
        self.app = app
        self.max_body = max_body
        self.is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def safe_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        limit = self.max_body if scope["path"] == "/predict" else SMALL
        refused = self._refuse(Headers(scope=scope), limit)
        if refused is not None:
            await refused(scope, receive, safe_send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            return message

        await self.app(scope, bounded, safe_send)

    def _refuse(self, headers: Headers, limit: int) -> JSONResponse | None:
        length = headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            return JSONResponse({"detail": "Content-Length is not a number"}, 400)
        if length is not None and int(length[:20]) > limit:
            return JSONResponse({"detail": f"the body is larger than {limit} bytes"}, 413)
        host = headers.get("host", "")
        origin = headers.get("origin")
        # A page of another site cannot make a browser call us in its user's name.
        if origin is not None and _netloc(origin) != host.lower():
            return JSONResponse({"detail": "calls from pages of other sites are refused"}, 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return JSONResponse({"detail": "calls from pages of other sites are refused"}, 403)
        if self.is_open() and not is_loopback(_hostname(host)):
            return JSONResponse({"detail": "this service answers to localhost only as long as it has no tokens"}, 403)
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
