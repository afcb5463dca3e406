"""Rules about jobs: turns, profiles, faults, progress and the end."""
