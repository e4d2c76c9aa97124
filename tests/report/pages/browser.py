"""Run a page in headless Chromium, without a network, and return what it looks like to scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=4000", "--dump-dom"),
)


def ask(page: Path, script: str, *flags: str, width: int = 1280) -> dict[str, Any]:
    """Show the page in a frame `width` pixels wide and return the object that `script` evaluates to inside it.

    The script is let through by adding its hash to the page's own policy; nothing else of the policy changes.
    """
    assert CHROMIUM is not None
    probe = f"parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*');"
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8")
    assert "script-src 'sha256-" in html.unescape(text)
    text = re.sub(r"script-src ", f"script-src 'sha256-{digest}' ", text, count=1)
    text = text.replace("</body>", f"<script>{probe}</script></body>")
    with tempfile.TemporaryDirectory() as folder:
        inner, outer = Path(folder) / "inner.html", Path(folder) / "outer.html"
        inner.write_text(text, encoding="utf-8")
        outer.write_text(
            f'<!doctype html><iframe src="inner.html" width="{width}" height="800" style="border:0"></iframe>'
            "<pre></pre><script>addEventListener('message', (event) => "
            "{ document.querySelector('pre').textContent = event.data; });</script>",
            encoding="utf-8",
        )
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1400,900", *flags, outer.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    assert found[1], "the page sent no answer: its policy stopped the probe, or it raised"
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer
