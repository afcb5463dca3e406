"""Which versions of the protocol this release speaks, and which one two ends speak together.

The number is of what agent and master say to each other: `control.proto`, and the Structs that it
carries packed. Both ends tell a range, and both take the newest that is in both. What a version
added is said to an end that speaks it, and to no other; docs/contributing.md has the rules.
"""

#: 4: agents tell a range, and their engine, and look at their hosts for a master. The oldest, which
#: masters take of agents, is the newest of the release before.
OLDEST, NEWEST = 3, 4
#: The oldest that agents take of masters: one that speaks less knows no engines, and would have
#: workers of two train together.
OLDEST_MASTER = 4
#: Who speaks less is asked nothing about its host.
EXAMINES = 4


def common(oldest: int, newest: int) -> int | None:
    """The newest that this release and an end with that range speak; None: there is none."""
    shared = min(newest, NEWEST)
    return shared if shared >= max(oldest, OLDEST) else None


def span(oldest: int, newest: int) -> str:
    """In words: `protocol 3`, `protocols 3 to 4`."""
    return f"protocol {oldest}" if oldest == newest else f"protocols {oldest} to {newest}"


def refusal(node: str, oldest: int, newest: int) -> str:
    """Why an agent of that range, with nothing in `common`, cannot take part; what to upgrade."""
    behind = "the master" if oldest > NEWEST else f"Oobleck on {node}"
    return (
        f"the agent speaks {span(oldest, newest)} and this master {span(OLDEST, NEWEST)}: upgrade "
        f"{behind}, one release after the other"
    )
