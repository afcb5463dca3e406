"""What pages show of a cluster and its jobs, as plain data that follows from what the master says.

Shared by `oobleck top` and `oobleck dashboard`. Pure; must not know terminals nor HTML.
"""
