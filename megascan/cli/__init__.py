"""The commands of `megascan`: the only package that puts the core, aggregate and detect together.

Each command is a file of its name with `add_arguments(parser)` and `run(arguments) -> exit code`;
the file's docstring is the command's help. main.py finds and runs commands: start there. Flags of
several commands are in options.py (runs, ranks, thresholds, workers), printing and writing in
output.py. Packages are imported late, so that `megascan --help` answers at once.
"""
