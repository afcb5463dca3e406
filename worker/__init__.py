"""The training process: an interpreter of programs and the state they act on."""
