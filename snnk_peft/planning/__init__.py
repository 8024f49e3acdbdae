"""Which parts a model is converted with, from what each of them costs and does: `plan`."""
