"""Not written yet."""

from typing import Any, ClassVar


class SlimeAdapter:
    name: ClassVar[str] = "slime"
    title: ClassVar[str] = "slime"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
