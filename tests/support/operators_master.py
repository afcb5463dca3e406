"""A master of which operators' commands get just the answers that a test gives."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from oobleck.proto.control_pb2_grpc import OperatorServicer, add_OperatorServicer_to_server


@contextmanager
def answering(
    listen: str = "127.0.0.1:0", *, at_once: int = 2, **answers: Callable[[Any], Any]
) -> Iterator[str]:
    """Its address. `answers`: by the call's name; to all others the master is away. `at_once`:
    calls that are answered at a time; a stream is one while it lasts."""

    class Service(OperatorServicer):
        pass

    def away(_: object, request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is there")

    for name in (name for name in vars(OperatorServicer) if name[0].isupper()):
        setattr(Service, name, away)
    for name, answer in answers.items():
        setattr(Service, name, lambda _, request, context, answer=answer: answer(request))
    server = grpc.server(ThreadPoolExecutor(at_once))
    add_OperatorServicer_to_server(Service(), server)
    port = server.add_insecure_port(listen)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
