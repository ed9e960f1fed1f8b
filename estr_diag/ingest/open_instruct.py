"""Not written yet."""

from typing import Any, ClassVar


class OpenInstructAdapter:
    name: ClassVar[str] = "open-instruct"
    title: ClassVar[str] = "open-instruct"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
