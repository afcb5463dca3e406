"""Services of the machine for every process.

They are log lines, dying with the parent, stopping children, and the channel between an agent and
its workers. A leaf under master, agent, worker and cli: it may import `core` only.
"""
