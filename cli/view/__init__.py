"""Views of a cluster and its jobs for pages: plain data computed from the master's answers.

Shared by `oobleck top` and `oobleck dashboard`. Pure; must not know terminals or HTML.
"""
