"""The page at `/`: one file, the same for everybody, under headers that let a browser run and load nothing but what stands in it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html").read_bytes()


def _sources(tag: bytes) -> str:
    """The page's own elements of a kind, as a Content-Security-Policy names them: by their hashes."""
    bodies = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(body).digest()).decode()}'" for body in bodies)


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_sources(b'script')}",
        f"style-src {_sources(b'style')}",
        "connect-src 'self'",
        "img-src data:",  # an icon that is none: browsers look for one elsewhere
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup, whatever the script does
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page(status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """The page as a response. It holds nothing of this server, and asks for a key where its own requests are refused."""
    return HTMLResponse(PAGE, status, {**HEADERS, **(headers or {})})
