"""Examinations for `oobleck doctor`: faults of a host, its folders and its paths to other hosts.

Each host is examined by a process of its own.
"""
