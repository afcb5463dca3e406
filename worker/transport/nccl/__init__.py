"""NCCL between GPUs: what a step sends and sums."""
