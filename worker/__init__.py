"""The training process: it runs compiled programs on the layers that it holds."""
