"""placeholder"""
from typing import ClassVar
class GenericAdapter:
    name: ClassVar[str] = "generic"
    title: ClassVar[str] = "generic"
    layouts = ()
    def probe(self, head): return None
