"""Tasks that the registered configs train on, one file each."""
