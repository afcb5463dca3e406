"""Acceptance tests of the engine on GPUs (`python -m bench.gpu`)."""
