"""Supervisor on every GPU host: one session with the master, one process per worker."""

from oobleck.host.programs import quiet_grpc, refuse_older_tls

refuse_older_tls()
quiet_grpc()
