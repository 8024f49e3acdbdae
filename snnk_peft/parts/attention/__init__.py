"""Linear attention: the part, its slots and fits, and the only place that registers with transformers' interfaces."""
