"""The checkpoints of a run on disk: `folder.py` has their folders, `run_files.py` the files that a resumed run continues."""
