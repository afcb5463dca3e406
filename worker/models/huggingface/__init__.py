"""Any causal language model of transformers as a row of layers, by its own classes."""
