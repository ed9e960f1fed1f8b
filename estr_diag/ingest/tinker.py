"""Not written yet."""

from typing import Any, ClassVar


class TinkerAdapter:
    name: ClassVar[str] = "tinker-cookbook"
    title: ClassVar[str] = "tinker-cookbook"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
