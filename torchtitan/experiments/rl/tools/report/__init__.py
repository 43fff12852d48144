"""Pages about runs, made from their folders."""
