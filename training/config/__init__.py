"""The config of a run: its sections, how it is read and checked, and the plan that follows from it.

`sections` holds the fields, `load` reads YAML and the command line, `build` puts a `Config`
together, and `plan` says what it means for a number of processes.
"""
