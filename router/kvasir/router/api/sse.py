"""Server-sent events: the bytes of one event. No I/O."""

import json
from collections.abc import Mapping

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, object]) -> bytes:
    """One event with a JSON payload; JSON has no line break, so one data line holds it."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
