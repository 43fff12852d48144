"""Tools around runs: evaluation, play and the report.

The commands that start them are modules beside this folder.
"""
