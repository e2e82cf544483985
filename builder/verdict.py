"""What was found when a finished engine was asked, before it is published. Comes in: sections and figures. Goes out:
`Verdict`. Must not know: who asks, and what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """`sections` are added to the plan (name -> bytes); `quality` stands in the report; `broken` are the bounds that
    the engine is beyond, in words: if there are any, the plan is not published.
    """

    sections: Mapping[str, bytes]
    quality: Mapping[str, Any]
    broken: tuple[str, ...] = ()
