"""Products of sparse matrices (`moe.sparse` says what they are for), one operator per file."""
