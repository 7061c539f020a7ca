"""Who may read the page's data: an ASGI wrapper that checks Host, Origin and token, and sets the headers of every answer.

A page of another site in the same browser can send requests to this address, under a name that it has made to point here
(DNS rebinding). So the Host must be an address or a name of this machine, the Origin must be our own, and data needs the token
in a header, which no other site can set. The token stands behind the `#` of the address: browsers send that part nowhere.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from typing import Any, Awaitable, Callable, Dict, FrozenSet, MutableMapping, Optional, Tuple

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_OPEN = ("/", "/page/")  # without the token: the page itself, which knows nothing of any run
_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


def own_names() -> FrozenSet[str]:
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0], socket.getfqdn().lower()})


class Guard:
    def __init__(self, app: App, token: str, names: FrozenSet[str]) -> None:
        self.app, self.names = app, names
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        why = self.refusal(scope)

        async def send_with_headers(message: Dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        if why is None:
            await self.app(scope, receive, send_with_headers)
            return
        status, text = why
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": (text + "\n").encode()})

    def refusal(self, scope: Scope) -> Optional[Tuple[int, str]]:
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        host = headers.get("host", b"").decode("latin-1")
        if not self._is_ours(host):
            return 403, "this Host is not a name of this machine; open the address that drumbeat printed"
        origin = headers.get("origin")
        if origin is not None and origin.decode("latin-1").lower() != f"http://{host.lower()}":
            return 403, "requests from other sites are refused"
        if headers.get("sec-fetch-site", b"none") not in (b"none", b"same-origin") and scope["path"] != "/":
            return 403, "requests from other sites are refused"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page can only be read"
        if scope["path"] == _OPEN[0] or scope["path"].startswith(_OPEN[1]):
            return None
        scheme, _, given = headers.get("authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            return (
                401,
                "the token is missing or wrong: open the address that drumbeat printed, with what stands behind the #",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Any port: a tunnel may have another one than we do."""
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", host)
        if not found:
            return False
        name = found.group(1).strip("[]").lower()
        try:
            ipaddress.ip_address(name)
            return True  # no name, so nobody else can have made it point here
        except ValueError:
            return name in self.names
