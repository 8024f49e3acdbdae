"""Programs that a paper needs once: trainings from scratch, measurements of their own."""
