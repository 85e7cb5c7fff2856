"""Access control: which requests are answered, and what browsers may do with the answers.

The server listens on 127.0.0.1 only, and that is not enough. Any page in the same browser can send requests there.
Other people may have accounts on the machine. A hostile name server can make a name of its own point to 127.0.0.1. So a
request must name the right host, must not be sent by another site's page, and must carry a token that is made at the
start. The token comes in the address that is opened first; from then on it is a cookie, and the address is without it.
Nothing can be changed: there is only GET. A page may load nothing but our own style sheet and script, so that HTML that
slipped in through a run's folder could not run.
"""

from __future__ import annotations

import secrets
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpsgd.dashboard import pages

TOKEN = "token"
"""Name of the token in the address."""

_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self'; style-src 'self' 'sha256-{pages.style_digest()}'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_NOT_ALLOWED = (
    "Open the address that `cpsgd dashboard` printed, with its token: it is new whenever the dashboard starts."
)


class Guard:
    """An application that passes allowed requests on to another one."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        # Browsers share cookies between ports.
        self._cookie = f"cpsgd-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        request = Request(scope)
        answer = self._refusal(request)
        await (self._app if answer is None else answer)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Returns the refusal or redirection of a request; None if the application may answer it."""
        named = request.headers.getlist("host")
        if len(named) != 1 or named[0] not in self._hosts:
            return _page(421, "Wrong host", "This dashboard answers to its own address only.")
        if request.method not in ("GET", "HEAD"):
            return _page(405, "Nothing to change", "This dashboard only shows things.")
        given = request.query_params.get(TOKEN)
        if given is not None and self._right(given):
            return self._admitted(request)
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _page(403, "Not from here", "Another page asked for this one. " + _NOT_ALLOWED)
        if not self._right(request.cookies.get(self._cookie, "")):
            return _page(403, "A token is needed", _NOT_ALLOWED)
        return None

    def _right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())

    def _admitted(self, request: Request) -> Response:
        """Puts the token into a cookie and takes it out of the address."""
        rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != TOKEN])
        # A path that begins with two slashes would name another host.
        place = "/" + request.url.path.lstrip("/\\") + (f"?{rest}" if rest else "")
        answer = RedirectResponse(place, status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer


def _page(status: int, title: str, text: str) -> Response:
    headers = {"Allow": "GET, HEAD"} if status == 405 else None
    return HTMLResponse(pages.render_saved("refused.html", title=title, text=text), status, headers)
