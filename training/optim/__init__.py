"""Optimizers (one file each), their parameter groups, and the schedule of the learning rate.

What engines do with an optimizer is `parallel.engines`' business.
"""
