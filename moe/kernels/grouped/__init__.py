"""The grouped products of the experts and what goes with them, one operator per file."""
