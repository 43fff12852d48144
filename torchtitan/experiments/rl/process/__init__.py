"""What a process of a run is set up with: `setup.py` changes the process, `logs.py` has the log's handlers and formats."""
