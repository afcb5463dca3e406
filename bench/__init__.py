"""What this program costs, measured; each module says how it is run."""

from oobleck.host.ipc import tls

tls.refuse_older()
