"""Not written yet."""

from typing import Any, ClassVar


class PipelineRLAdapter:
    name: ClassVar[str] = "pipelinerl"
    title: ClassVar[str] = "pipelinerl"
    layouts: ClassVar[tuple[Any, ...]] = ()

    def probe(self, head: Any) -> None:
        return None
