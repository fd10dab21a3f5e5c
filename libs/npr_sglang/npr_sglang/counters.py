"""What the plug-in has done, in numbers; the server tells them with its internal state."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Of one scheduler process, since it started.

    Attributes:
        stitches: contexts that were put in line, one a request.
        look_ups: how often that meant to look for its branches; else another request held it already.
        stitched_tokens: tokens whose keys and values were shared that way.
        evicted: contexts that were not in the cache as a whole.
        no_room: requests that would never have fitted.
        sealed: branches whose last token was written before they ended.
        pins: contexts that are held now, so that they are not evicted.
    """

    stitches: int = 0
    look_ups: int = 0
    stitched_tokens: int = 0
    evicted: int = 0
    no_room: int = 0
    sealed: int = 0
    pins: int = 0

    def to_dict(self) -> dict[str, int]:
        """All of them by name."""
        return asdict(self)


COUNTERS = Counters()
