"""Not written yet."""

from typing import Any, ClassVar


class TRLAdapter:
    name: ClassVar[str] = "trl"
    title: ClassVar[str] = "trl"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
