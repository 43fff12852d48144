"""What the scripts beside this folder share: kill_matrix, resume_matrix, soak.

`command.py` starts the command and watches it, `moments.py` finds the moment of a kill, `judge.py` says what is wrong with a
run folder, `after.py` what a run left behind.
"""
