"""Serve a model, ask it once over HTTP, and end the server.

python scripts/lib/serve_and_ask.py PROMPT NUM_TOKENS [flags of training.serve]
"""

from __future__ import annotations

import json
import subprocess
import sys
from tempfile import TemporaryFile
from urllib.request import Request, urlopen


def main() -> int:
    """Print the answer; returns the exit code."""
    prompt, num_tokens, *flags = sys.argv[1:]
    sizes = [
        int(flags[place + 1])
        for place, flag in enumerate(flags)
        if flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    ]
    num_ranks = 1
    for size in sizes:
        num_ranks *= size
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
    # The launcher writes a traceback even if it is asked to end.
    log = TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
    server = subprocess.Popen(
        [sys.executable, "-m", *launcher, "training.serve", *flags, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if line.startswith("serving "):
                url = line.split(" at ")[1].split()[0]
                print(ask(url, prompt, int(num_tokens)).strip())
                return 0
        log.seek(0)
        print(log.read(), "error: the server has ended", sep="", file=sys.stderr)
        return 1
    finally:
        server.terminate()
        server.wait()


def ask(url: str, prompt: str, num_tokens: int) -> str:
    """Return the likeliest continuation."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    request = Request(
        f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=100) as answer:
        return str(json.load(answer)["choices"][0]["text"])


if __name__ == "__main__":
    sys.exit(main())
