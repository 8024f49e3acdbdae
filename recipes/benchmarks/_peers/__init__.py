"""Baselines: other ways to shrink a fine-tuned BERT, as their papers describe them."""
