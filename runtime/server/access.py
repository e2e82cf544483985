"""Who may ask: API keys, sent as `Authorization: Bearer KEY`, compared in constant time.

Comes in: keys, an ASGI application. Goes out: the application, or 401. Must not know: endpoints beyond their paths.

Of a key only its SHA-256 is kept. Every key is compared with what was sent, whichever matches, so that the time taken
tells nothing. Probes and metrics stay open: whoever reads them has no key, and they say nothing of any request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.artifacts.errors import UsageError
from llmc.runtime.server.errors import ApiError, response_of

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


def read_keys(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """The keys given one by one and those of a file, one a line; raises UsageError for one that no header can carry."""
    keys = list(given)
    if file is not None:
        try:
            found = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {file}: cannot be read: {error}") from error
        if not found:
            raise UsageError(f"--api-key-file {file}: holds no key; write one a line")
        keys += found
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("an API key is empty or has characters that a header cannot carry; use printable ASCII")
    return tuple(keys)


class ApiKeys:
    """The keys that are accepted; none means that everybody may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def scope_of(self, authorization: str | None) -> str | None:
        """A name for the key in this header, the same for each of its requests; None where it is no key of ours."""
        kind, _, key = (authorization or "").partition(" ")
        sent = _digest(key.strip())
        matches = [digest for digest in self._digests if hmac.compare_digest(digest, sent)]
        return matches[0].hex()[:16] if matches and kind.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


class RequireKey:
    """Answers 401 to a request without one of the keys. `scope["state"]["key_scope"]` names the key of one with."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            found = self._keys.scope_of(Headers(scope=scope).get("authorization"))
            if found is None:
                error = ApiError(
                    401,
                    "the request carries no valid API key; send one as Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await response_of(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["key_scope"] = found
        await self._app(scope, receive, send)
