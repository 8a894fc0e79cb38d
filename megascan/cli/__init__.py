"""The commands of `megascan`: the only room that puts the core, aggregate and detect together.

Each command is a file of its name with `add_arguments(parser)` and `run(arguments) -> exit code`;
its docstring is its help. main.py finds and runs it: start there. What several commands take stands
in options.py (which run, which ranks, thresholds, who does the work), what they print and write in
output.py. Packages are imported late, so that `megascan --help` answers at once.
"""
