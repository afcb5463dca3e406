"""Incidents and slowdowns: what they are, and how they are followed."""
