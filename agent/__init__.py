"""Supervisor on every GPU host: one session with the master, one process per worker."""

from oobleck.host.ipc import tls

tls.refuse_older()
