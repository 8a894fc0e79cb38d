"""Check the flags of a job before a rank is started, so that a mistake is one sentence.

python scripts/lib/check_flags.py WORLD_SIZE RANKS_ON_THIS_NODE -- FLAGS OF training.pretrain_gpt
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from megascan.errors import MissingError, report_errors

_NEEDED = ("torch", "megatron.core")


def main(words: Sequence[str]) -> int:
    """Return 0 if a job with these flags would start; raise MegaScanError otherwise."""
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name.split(".")[0])]
    if missing:
        raise MissingError(
            f"{sys.executable} has no {' and no '.join(missing)}: install MegaScan with the extra "
            "train there, or name another interpreter with MEGASCAN_PYTHON"
        )
    from training.distributed import Launch
    from training.job import parse_job

    world_size, local_world_size = int(words[0]), int(words[1])
    launch = Launch(rank=0, local_rank=0, world_size=world_size, local_world_size=local_world_size)
    parse_job(words[3:], launch)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
