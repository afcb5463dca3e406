"""NCCL between GPUs: messages and sums of a step."""
