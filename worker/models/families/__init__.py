"""The families that a job names by their kind: each a module of that name, with a `FAMILY`."""
