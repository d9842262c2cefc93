"""How tokens travel to the experts of other processes, and back."""
