"""The processes of a run: spawned, connected, watched, and replaced when one dies."""
