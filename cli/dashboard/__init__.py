"""`oobleck dashboard`: pages of a cluster for browsers, served by a client of the master."""
