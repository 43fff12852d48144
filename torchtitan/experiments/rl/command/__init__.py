"""From the words of a command line to a checked config, a plan and a run's folder."""
