"""Optimizer: parameter groups, the update, the schedule of the learning rate."""
