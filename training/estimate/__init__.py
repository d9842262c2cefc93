"""Memory, time and arithmetic of a run before it is started."""
