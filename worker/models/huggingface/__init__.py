"""Models of transformers as a row of layers, by their own classes."""
