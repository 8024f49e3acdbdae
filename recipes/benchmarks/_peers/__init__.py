"""Other ways to shrink a fine-tuned BERT, as their papers describe them, for `convert_peers.py` to compare with."""
