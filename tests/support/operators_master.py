"""A double of a master for operators' commands: it gives the answers that a test gives it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from bench.support.ports import choose_address
from oobleck.proto.control_pb2_grpc import OperatorServicer, add_OperatorServicer_to_server


@contextmanager
def answering(
    listen: str | None = None, *, at_once: int = 2, **answers: Callable[[Any], Any]
) -> Iterator[str]:
    """Yield its address. `listen`: None for one that the next can have too; `answers`: by the
    call's name; all other calls fail as UNAVAILABLE. `at_once`: calls that are answered at a time;
    a stream is one while it lasts."""

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
    address = listen or choose_address()
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait()
