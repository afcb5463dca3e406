"""The operator's command."""

from oobleck.host import tls

tls.refuse_older()
