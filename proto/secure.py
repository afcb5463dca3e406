"""Channels to a master: in the clear on this host, else with certificates at both ends (TLS).

A client shows its own certificate and accepts only a master's certificate from its trusted
authority, at whatever address. Must not know calls.
"""

import threading
from collections.abc import Sequence

import grpc

from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import MASTER_NAME, Credentials

Options = Sequence[tuple[str, int | str]]

#: A certificate is for the master's name, not for its address.
_TARGET: Options = (("grpc.ssl_target_name_override", MASTER_NAME),)
#: Hosts set http_proxy for downloads, and gRPC would use it for every address, even loopback.
_DIRECT: Options = (("grpc.enable_http_proxy", 0),)


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        credentials.authority, credentials.key, credentials.certificate
    )


def open_channel(endpoint: Endpoint, options: Options) -> grpc.Channel:
    if endpoint.credentials is None:
        return grpc.insecure_channel(endpoint.address, options=(*options, *_DIRECT))
    return grpc.secure_channel(
        endpoint.address,
        channel_credentials(endpoint.credentials),
        options=(*options, *_DIRECT, *_TARGET),
    )


def open_aio_channel(endpoint: Endpoint, options: Options) -> grpc.aio.Channel:
    if endpoint.credentials is None:
        return grpc.aio.insecure_channel(endpoint.address, options=(*options, *_DIRECT))
    return grpc.aio.secure_channel(
        endpoint.address,
        channel_credentials(endpoint.credentials),
        options=(*options, *_DIRECT, *_TARGET),
    )


class Channels:
    """Channels of this process. Users of one name and endpoint share a channel, which is closed
    when the last of them leaves."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        #: Channel with a name, and number of its users.
        self._shared: dict[tuple[Endpoint, str], tuple[grpc.Channel, int]] = {}

    def take(self, endpoint: Endpoint, name: str) -> grpc.Channel:
        """Return the channel of that name, or one of its own for an empty name."""
        if not name:
            return open_channel(endpoint, self._options)
        with self._lock:
            shared = self._shared.get((endpoint, name))
            channel, users = shared or (open_channel(endpoint, self._options), 0)
            self._shared[endpoint, name] = channel, users + 1
            return channel

    def leave(self, channel: grpc.Channel, endpoint: Endpoint, name: str) -> None:
        """Undo one `take`."""
        if name:
            with self._lock:
                _, users = self._shared.pop((endpoint, name))
                if users > 1:
                    self._shared[endpoint, name] = channel, users - 1
                    return
        channel.close()
