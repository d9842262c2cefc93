"""What a run tells: log lines, metrics and events, plots, and findings about a run."""
