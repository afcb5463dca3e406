"""The GPUs of a host: which workers use, where they are, and how. No torch, no CUDA."""
