"""Rules about workers that are slower than the others."""
