"""The operator's command."""

from oobleck.host.ipc import tls

tls.refuse_older()
