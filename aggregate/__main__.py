"""`python -m aggregate` is `megascan aggregate`."""

import sys

from megascan.cli import main

sys.exit(main(["aggregate", *sys.argv[1:]], own_process=True))
