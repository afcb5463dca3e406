"""Reducer: the functions by which events change the state."""
