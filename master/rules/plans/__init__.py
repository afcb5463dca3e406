"""Rules about plans: the first one, those after a change, and when they come."""
