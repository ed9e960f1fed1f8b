"""Pages in a real browser: open one with the network off, run a script in it, and read what it left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(frozen=True, slots=True)
class Visit:
    """What came of a visit.

    Attributes
    ----------
    console
        Lines that the page wrote to the console, errors among them.
    requests
        Addresses that it asked for, other than its own file.
    answer
        What the script returned.
    """

    console: list[str]
    requests: list[str]
    answer: Any


def visit(page: Path, script: str = "null", *, width: int = 1000) -> Visit:
    """Open a page and evaluate an expression in it, after its own script has run."""
    probed = page.with_name(f"{page.stem}-probed.html")
    # The page's own policy allows inline scripts; the probe is one.
    probe = f"<script>addEventListener('load', () => {{ document.title = 'probe:' + JSON.stringify([{script}, performance.getEntriesByType('resource').map((e) => e.name)]); }});</script>"
    probed.write_text(page.read_text("utf-8").replace("</body>", probe + "</body>"), "utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000",
        f"--window-size={width},1200", f"--user-data-dir={page.parent / 'profile'}",
        "--disable-background-networking", "--disable-component-update", "--no-first-run", "--dump-dom", probed.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>probe:(.*?)</title>", done.stdout, re.S)
    assert title, f"the page did not load: {done.stderr[-2000:]}"
    answer, asked = json.loads(
        title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    )
    return Visit([line for line in done.stderr.splitlines() if "CONSOLE" in line], asked, answer)
