"""Every private API and patch of a dependency, one file per dependency."""
