"""The operator's command."""

from oobleck.host.programs import refuse_older_tls

refuse_older_tls()
