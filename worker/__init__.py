"""The training process: runs programs on the state that it holds."""
