"""Initial factors U, V of a layer, found by name through `LOW_RANK_INITS`."""
