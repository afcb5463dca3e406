"""The cluster's head: a pure, journaled state machine in a thin asynchronous shell."""

from oobleck.host.programs import quiet_grpc, refuse_older_tls

refuse_older_tls()
quiet_grpc()
