"""HTTP middleware: limits on requests without end, pages of other sites, and names of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from wise_atta.serve.config import is_loopback

# Bodies of all calls but /predict are small.
SMALL = 2**20
# What a link on another site may lead to. Calls answer to our own pages and to programs.
LINKED = ("/", "/label")
# Headers that a proxy adds: behind one, a caller that seems to be on this machine may be anywhere.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
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


class RequestFilter:
    """An ASGI layer around the application.

    Parameters
    ----------
    app
        What it protects.
    max_body
        Bytes that `/predict` may be sent.
    patience
        Seconds within which a request has to arrive in whole.
    is_open
        Whether calls need no token. Then a page of another site could call through a browser on this machine, also
        under a foreign name that DNS resolves to it (DNS rebinding), and both are refused.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, patience: float, is_open: Callable[[], bool]) -> None:
        self.app = app
        self.max_body = max_body
        self.patience = patience
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
        refused = self._refuse(scope["path"], Headers(scope=scope), limit)
        if refused is not None:
            await refused(scope, receive, safe_send)
            return
        received, whole = 0, False
        deadline = asyncio.get_running_loop().time() + self.patience

        async def bounded() -> Message:
            nonlocal received, whole
            if whole:
                # Nothing but the end of the connection is waited for, which may take its time.
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self.patience:g} seconds") from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            return message

        await self.app(scope, bounded, safe_send)

    def _refuse(self, path: str, headers: Headers, limit: int) -> JSONResponse | None:
        length = headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            return JSONResponse({"detail": "Content-Length is not a number"}, 400)
        if length is not None and int(length[:20]) > limit:
            return JSONResponse({"detail": f"the body is larger than {limit} bytes"}, 413)
        host = headers.get("host", "")
        origin = headers.get("origin")
        # A page of another site cannot make a browser call us in its user's name.
        if origin is not None and _netloc(origin) != host.lower():
            detail = "calls from pages of other sites are refused; a proxy has to pass on the Host header as it came"
            return JSONResponse({"detail": detail}, 403)
        linked = path in LINKED and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not linked:
            return JSONResponse({"detail": "calls from pages of other sites are refused"}, 403)
        if self.is_open() and (not is_loopback(_hostname(host)) or any(name in headers for name in FORWARDED)):
            return JSONResponse({"detail": "this service answers to localhost only as long as it has no tokens"}, 403)
        return None


class Patient(H11Protocol):
    """HTTP/1.1 with timeouts: a connection is closed when its request is not complete, or its reply not taken, in time.

    The server itself waits without end for the rest of a header, for the rest of a body that was refused, and for a
    reply to be taken. Many such connections would keep other callers out.
    """

    patience = 10.0
    # Seconds within which some of a reply has to be taken.
    taking = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._hurry: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        # So that `pause_writing` tells of everything that the other side has not taken, also once all is said.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()
        self._taken()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._idle:
            self._relax()
        elif self._hurry is None and not self.transport.is_closing():
            self._hurry = self.loop.call_later(self.patience, self._hang_up)

    def _relax(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _hang_up(self) -> None:
        self._hurry = None
        if self._idle:
            self.transport.close()

    def _await_taking(self) -> None:
        self._stuck = self.loop.call_later(self.taking, self._give_up, self._left)

    @property
    def _left(self) -> int:
        """Bytes that the other side has not taken, here and with the system, which asks for more in leaps only."""
        waiting = bytes(4)
        # Without a socket, or where the system does not say.
        with contextlib.suppress(TypeError, ValueError, OSError):
            waiting = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, waiting)
        return self.transport.get_write_buffer_size() + int.from_bytes(waiting, sys.byteorder)

    def _give_up(self, before: int) -> None:
        if self._left < before:
            self._await_taking()
        else:
            # Closed in good order, it would wait for the rest to be taken.
            self.transport.abort()

    def _taken(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


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
