"""Other ways to shrink a fine-tuned BERT, as their papers describe them, to compare with."""
