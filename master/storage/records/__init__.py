"""The lines that jobs leave in files: events, incidents, plans, steps."""
