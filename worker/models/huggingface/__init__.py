"""Models of transformers as a list of layers, computed by their own classes."""
