"""Not written yet."""

from typing import Any, ClassVar


class ARealAdapter:
    name: ClassVar[str] = "areal"
    title: ClassVar[str] = "areal"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
