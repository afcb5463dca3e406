"""The supervisor on every GPU host: one session with the master, one process per worker."""
