"""`python aggregate.py -b DIR [-o FILE] [-d]`: does what `megascan aggregate` does.

A package wins over a module of the same name: `import aggregate` finds the folder next to this
file.
"""

import sys

from megascan.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["aggregate", *sys.argv[1:]]))
