"""Not written yet."""

from typing import Any, ClassVar


class VerlAdapter:
    name: ClassVar[str] = "verl"
    title: ClassVar[str] = "verl"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
