"""Supervisor on every GPU host: one session with the master, one process per worker."""

from oobleck.host.programs import refuse_older_tls

refuse_older_tls()
