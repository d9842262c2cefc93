"""From router logits to the sorted pairs of tokens and experts, one operator per file."""
