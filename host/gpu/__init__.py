"""GPUs of a host: the choice of those for workers, their places, and their health. No torch, no
CUDA."""
