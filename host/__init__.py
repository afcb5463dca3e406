"""Services of the machine for every process; imports `core` only."""
