"""Examinations for `oobleck doctor`: faults of a host, its folders and the paths between hosts,
each examined by a process of its own."""
