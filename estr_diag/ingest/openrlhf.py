"""Not written yet."""

from typing import Any, ClassVar


class OpenRLHFAdapter:
    name: ClassVar[str] = "openrlhf"
    title: ClassVar[str] = "openrlhf"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
