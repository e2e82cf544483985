"""Service levels of a request, and whether it met them: `ttft=500ms,tpot=50ms`.

Comes in: text, measured seconds. Goes out: `Slo`. Must not know: who measures.

Goodput counts the requests that met every level (Zhong et al., DistServe, 2024).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmc.artifacts.errors import UsageError

#: Time to the first token, time per output token after it, and from end to end.
NAMES = ("ttft", "tpot", "e2el")
_LEVEL = re.compile(r"(?P<name>[a-z0-9]+)=(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>ms|s)")


@dataclass(frozen=True)
class Slo:
    """The most that each may take, in seconds, by name."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Raises UsageError for what is not levels such as ttft=500ms,tpot=50ms."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            found = _LEVEL.fullmatch(part.strip())
            if found is None or found["name"] not in NAMES or found["name"] in limits:
                raise UsageError(
                    f"--slo {text!r}: {part.strip()!r} is no service level; write ttft=500ms,tpot=50ms, each of "
                    f"{', '.join(NAMES)} at most once, in ms or s"
                )
            limits[found["name"]] = float(found["number"]) / (1000 if found["unit"] == "ms" else 1)
        return cls(limits)

    def missed(self, times: dict[str, float | None]) -> list[str]:
        """The levels that were missed. What there was not (no second token, so no tpot) is met."""
        return [name for name, limit in self.limits.items() if (value := times[name]) is not None and value > limit]
