"""Experts that come and go: importance, policy, and the changes themselves."""
