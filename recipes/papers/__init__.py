"""The experiments of the papers: studies, claims, their own programs and shared code."""
