"""Views of a cluster and its jobs for pages, as plain data that follows from what the master says.

Shared by `oobleck top` and `oobleck dashboard`. Pure; must not know terminals nor HTML.
"""
