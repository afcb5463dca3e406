"""Numbers as a function of what they are for."""

import hashlib


def derive(*purpose: object) -> int:
    """64 well-mixed bits for what `purpose` names."""
    text = "/".join(str(part) for part in purpose)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
