"""Programs for single papers: trainings from scratch, and special measurements."""
