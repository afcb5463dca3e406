"""Planning: pure, deterministic functions over plain data.

Owns the words of the system (job, profile, template, plan, program) and every decision about
who holds which layer and who does what when. Must not know torch, gRPC, asyncio, the clock or
any I/O beyond parsing a text that it is given.
"""
