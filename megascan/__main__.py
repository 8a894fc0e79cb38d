"""`python -m megascan` is `megascan`."""

import sys

from megascan.cli import main

sys.exit(main())
