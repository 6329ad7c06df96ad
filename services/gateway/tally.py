"""How much a peer has sent of what it is sending, against the bounds of a connection."""

from __future__ import annotations

from services.gateway.connections import Bounds

_CONTENT_SHARE = 8
"""Bytes of a body for each of its framing: with less, as in chunks of five bytes, the parser is most of the work."""


class Tally:
    """Counts. What returns a bool says whether that is too much."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.head_bytes = self.head_fields = 0
        self._earlier_heads = 0  # bytes of those before it, while any of them is under way
        self._wire_bytes = self._body_bytes = 0  # of a body as it was sent, and as it is meant
        self._ahead_bytes = self._thrown_away = 0

    @property
    def heads_bytes(self) -> int:
        """Of all heads that are under way."""
        return self._earlier_heads + self.head_bytes

    def begin_head(self) -> None:
        self._earlier_heads += self.head_bytes
        self.head_bytes = self.head_fields = 0

    def begin_body(self) -> None:
        self._wire_bytes = self._body_bytes = 0

    def rest(self) -> None:
        """Nothing is under way."""
        self._ahead_bytes = self._earlier_heads = self.head_bytes = 0

    def head(self, size: int) -> bool:
        self.head_bytes += size
        return self.head_bytes > self._bounds.head_bytes

    def field(self) -> bool:
        """One more, of the head or behind the body."""
        self.head_fields += 1
        return self.head_fields > self._bounds.head_fields

    def content(self, size: int) -> None:
        """Of a body, as it is meant."""
        self._body_bytes += size

    def framing(self, size: int) -> bool:
        """``size`` more bytes of a body as it was sent; too much of them are not its own."""
        self._wire_bytes += size
        return self._wire_bytes - self._body_bytes > self._bounds.framing_bytes + self._body_bytes // _CONTENT_SHARE

    def unwanted(self) -> bool:
        """What came of a body that nobody reads."""
        return self._wire_bytes > self._bounds.rest_bytes

    def ahead(self, size: int) -> bool:
        self._ahead_bytes += size
        return self._ahead_bytes > self._bounds.ahead_bytes

    def throw_away(self, size: int) -> bool:
        self._thrown_away += size
        return self._thrown_away > self._bounds.rest_bytes
