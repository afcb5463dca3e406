"""Compiler from a plan to programs, and the proof that nobody waits for ever."""
