"""Pages, each of which lists its current parts."""
