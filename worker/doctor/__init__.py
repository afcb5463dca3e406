"""Checks of this host's GPUs, each as a process of its own (`python -m oobleck.worker.doctor`)."""
