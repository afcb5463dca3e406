"""Copies of a job's metrics and events for other programs."""
