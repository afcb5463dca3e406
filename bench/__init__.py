"""Benchmarks of Oobleck; each module says how it is run."""

from oobleck.host.programs import refuse_older_tls

refuse_older_tls()
