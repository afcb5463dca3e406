"""The cluster's head: a pure, journaled state machine in a thin asynchronous shell."""

from oobleck.host.ipc import tls

tls.refuse_older()
