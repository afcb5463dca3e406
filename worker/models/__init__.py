"""The models: each a row of layers, the units of placement and state.

Layer 0 is the embedding, the last one the head, between them the blocks. Owns what a layer computes
and its initial weights; knows nothing of stages, flat state or plans. `registry` builds a layer of
any model and gives it its weights.
"""
