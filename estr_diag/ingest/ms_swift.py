"""Not written yet."""

from typing import Any, ClassVar


class MsSwiftAdapter:
    name: ClassVar[str] = "ms-swift"
    title: ClassVar[str] = "ms-swift"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
