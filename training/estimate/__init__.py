"""Memory, time and arithmetic of a run before it is started.

counts    parameters by kind, and those that one process keeps
flops     arithmetic of a token; also for the MFU of the log
memory    of one process: what is kept, and the worst moment of a replay of one micro-batch (replay)
speed     seconds of a step, from measured rates of its parts
cost      a layout on paper: bytes over links beside arithmetic; chooses `parallel.expert`

scripts/estimate.py shows all of it. What was measured is not here: docs/performance.md.
"""
