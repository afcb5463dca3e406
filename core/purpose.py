"""Seeds that are a function of their purpose."""

import hashlib


def derive(*purpose: object) -> int:
    """Return 64 well-mixed bits for what `purpose` names."""
    text = "/".join(str(part) for part in purpose)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
