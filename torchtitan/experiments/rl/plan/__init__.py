"""What follows from a config and a machine: which process runs where, its memory and its cost."""
