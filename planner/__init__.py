"""Planning: pure, deterministic functions over plain data.

Owns every decision about who holds which layer and who does what when, on the words of
`oobleck.core`. Must not know torch, gRPC, asyncio, the clock or any I/O.
"""
