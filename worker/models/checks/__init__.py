"""Checks of a user's model before it trains: the facts that planning needs, and the model's
faults."""
