"""Not written yet."""

from typing import Any, ClassVar


class RollAdapter:
    name: ClassVar[str] = "roll"
    title: ClassVar[str] = "roll"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
