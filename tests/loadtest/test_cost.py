"""What the load generator costs: CPU time, which other programs hardly change."""

import subprocess
import sys
from pathlib import Path

from scripted_server import ScriptedServer, work

from zlm.loadtest.client import run_here
from zlm.loadtest.figures import figures
from zlm.loadtest.plan import Pace, Turn

STREAMS, TOKENS, GAP = 64, 64, 0.032  # 2,000 tokens a second, for two seconds
SERVER = """
import sys
from scripted_server import Script, ScriptedServer
with ScriptedServer(Script(gap=float(sys.argv[1]))) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


def test_2000_streamed_tokens_a_second_cost_under_15_percent_of_a_core() -> None:
    support = Path(sys.modules[ScriptedServer.__module__].__file__ or "").parent
    command = [sys.executable, "-c", SERVER, str(GAP)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=support, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        server = ScriptedServer.__new__(ScriptedServer)
        server.port = int(process.stdout.readline())
        turns = [(Turn([5, 6, 7], 3, TOKENS),)] * STREAMS
        pace = Pace(concurrency=STREAMS)
        level = figures(run_here(work(server, pace, STREAMS, conversations=turns)), pace)
        process.stdin.close()
    assert level["errors"] == 0 and level["events"] == STREAMS * TOKENS
    seconds_a_token = level["client_cpu"] * level["s"] / level["output_tokens"]
    print(f"{1e6 * seconds_a_token:.1f} µs of CPU a token at {level['out_tok_s']} tokens/s")
    assert 2000 * seconds_a_token < 0.15
