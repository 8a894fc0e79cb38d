"""`python -m aggregate` is `megascan aggregate`."""

import sys

from megascan.cli.main import main

sys.exit(main(["aggregate", *sys.argv[1:]]))
