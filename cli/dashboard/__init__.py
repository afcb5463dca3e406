"""`oobleck dashboard`: pages of a cluster for browsers, by a client of the master."""
