"""What endpoints share: the service, its names, and the gate that lets requests in only while generation works.

Comes in: a `Service` (or none yet). Goes out: `ServerContext`, reached through `of(request)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from llmc.artifacts.plan import Plan
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.service import Service

#: Text longer than this is tokenized in a thread: it takes milliseconds in which other streams must go on.
THREAD_CHARS = 8192
#: Prompts times n: what one request may start.
MAX_SEQUENCES = 1024


@dataclass
class ServerContext:
    """One per app. `names` are the model names that requests may use; the first is the one that answers carry.
    `connections` tells how many there are now.
    """

    plan: Plan
    names: tuple[str, ...]
    metrics: Metrics
    service: Service | None = None
    connections: Callable[[], int] = lambda: 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """Names the exact engine: the same fingerprint and seed give the same answer."""
        return f"llmc-{self.plan.digest[:12]}"

    @staticmethod
    def now() -> int:
        """Seconds since 1970, for `created`."""
        return int(time.time())

    def not_ready(self) -> str | None:
        """Why generation does not work now; None when it does."""
        return "the engine is loading" if self.service is None else self.service.front.not_ready()

    def admit(self, model: str | None) -> Service:
        """The service, or ApiError: 503 while generation does not work, 404 for a model that is not served."""
        if (reason := self.not_ready()) is not None or self.service is None:
            raise ApiError(503, f"{reason}", code="not_ready")
        self.check_model(model)
        return self.service

    def check_model(self, model: str | None) -> None:
        """Raises ApiError(404) for a name that is not served; None stands for the model there is."""
        if model is not None and model not in self.names:
            raise ApiError(
                404,
                f"the model {model!r} is not served here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )


def of(request: Request) -> ServerContext:
    """The context of the app that a request came to."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def tenant_of(request: Request) -> str:
    """Whom the prefix cache takes the client for: a name of its API key, "" where none is asked for."""
    return str(getattr(request.state, "key_scope", ""))
