"""What all kernels share: Triton or its stand-in, launches, operators, tuning, tiles.

Nothing here knows an operator; the other rooms import this one.
"""
