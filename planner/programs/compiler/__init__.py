"""Compiler from a plan to programs, and the proof that they cannot deadlock."""
