"""`python -m megascan` is `megascan`."""

import sys

from megascan.cli.main import main

sys.exit(main())
