"""Versions of the protocol that this release speaks, and the choice of one for two ends.

The number covers all that agent and master exchange: `control.proto`, and the Structs packed in its
messages. Each end sends a range, and both use the newest version that is in both. An addition is
sent only to an end whose version has it; docs/contributing.md has the rules.
"""

#: The oldest is at most the newest of the release before this one.
OLDEST, NEWEST = 1, 1


def common(oldest: int, newest: int) -> int | None:
    """Return the newest version that this release and such an end speak; None: there is none."""
    shared = min(newest, NEWEST)
    return shared if shared >= max(oldest, OLDEST) else None


def span(oldest: int, newest: int) -> str:
    """Format a range of versions: `protocol 3`, `protocols 3 to 4`."""
    return f"protocol {oldest}" if oldest == newest else f"protocols {oldest} to {newest}"


def refusal(node: str, oldest: int, newest: int) -> str:
    """Return why an agent of that range cannot take part, and which end to upgrade."""
    behind = "the master" if oldest > NEWEST else f"Oobleck on {node}"
    return (
        f"the agent speaks {span(oldest, newest)} and this master {span(OLDEST, NEWEST)}: upgrade "
        f"{behind}, one release after the other"
    )
