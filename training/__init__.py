"""Training: config, data, optimizer, schedules, loop pieces, evaluation, logging, faults.

`train.py` puts the pieces together and reads as prose. The model lives in `models`, the
Mixture-of-Experts layer in `moe`, what differs between one process and many in `parallel`.
"""
