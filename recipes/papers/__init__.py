"""The experiments of the papers: studies, claims, programs of their own, and what only they need."""
