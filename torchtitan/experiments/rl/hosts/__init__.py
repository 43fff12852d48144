"""The hosts of a run: which job gives them, what each has, and how their end is noticed."""
