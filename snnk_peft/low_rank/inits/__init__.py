"""Initial factors U, V of a layer, one method per file, found by name through `LOW_RANK_INITS`."""
