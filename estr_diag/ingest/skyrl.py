"""Not written yet."""

from typing import Any, ClassVar


class SkyRLAdapter:
    name: ClassVar[str] = "skyrl"
    title: ClassVar[str] = "skyrl"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
