"""The cluster's head: a pure, journaled state machine in a thin asynchronous shell."""

from oobleck.host.programs import refuse_older_tls

refuse_older_tls()
