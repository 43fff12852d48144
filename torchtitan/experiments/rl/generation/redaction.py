"""Takes a secret out of a text that a server sent, in whatever form the server repeats it."""

import base64
import html
import json
from urllib.parse import quote

REDACTED = "(key)"


def redacted(text: str, secret: str | None) -> str:
    """``text`` without ``secret``: as it is, escaped for JSON, HTML or a URL, in hexadecimal, or in base64 at any offset."""
    if not secret:
        return text
    for form in sorted(_forms(secret), key=len, reverse=True):
        text = text.replace(form, REDACTED)
    return text


def _forms(secret: str) -> set[str]:
    data = secret.encode()
    forms = {secret, html.escape(secret), quote(secret), quote(secret, safe=""), data.hex(), data.hex().upper()}
    for ascii_only in (True, False):
        escaped = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        forms |= {escaped, escaped.replace("/", "\\/"), json.dumps(escaped)[1:-1]}
    # Base64 of a longer text that holds the secret: three bytes are four digits, so the secret may begin at three places. The
    # digits at both ends also depend on its neighbours, and are left out.
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            digits = encode(bytes(offset) + data).decode()
            begin = -(-offset * 8 // 6)
            end = (offset + len(data)) * 8 // 6
            forms.add(digits[begin:end])
    return {form for form in forms if len(form) >= 4 or form == secret}
