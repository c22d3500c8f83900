"""How many front ends and tokenizers a server has when the user does not say.

Pure: options, the device and the number of CPUs in, options out. On a CPU the model takes what
cores there are, and a step takes so long that one process of each kind is never busy. A GPU makes
up to 100,000 tokens a second, each of which costs a front end about 8 microseconds (most of it the
system call that sends it) and a tokenizer 3: one of each would just do, with queues that show in
the gaps between tokens; and encoding many prompts that come at once takes a tokenizer longer than
prefilling them takes the GPU. Figures: bench/RESULTS.md, "What the host costs".
"""

import msgspec

from zlm.config import Config

CPUS_A_FRONT_END = 4
CPUS_A_TOKENIZER = 8
MOST_FRONT_ENDS = 4
MOST_TOKENIZERS = 4


def with_process_counts(config: Config, device: str, num_cpus: int) -> Config:
    """Return *config* with a number for each count it leaves open.

    *device* is ``cpu`` or ``cuda``; *num_cpus* are those that this process may use.
    """
    front_ends, tokenizers = 1, 1
    if device == "cuda":
        front_ends = min(MOST_FRONT_ENDS, max(1, num_cpus // CPUS_A_FRONT_END))
        tokenizers = min(MOST_TOKENIZERS, max(1, num_cpus // CPUS_A_TOKENIZER))
    server = config.server
    server = msgspec.structs.replace(
        server,
        api_server_count=server.api_server_count or front_ends,
        tokenizer_pool_size=server.tokenizer_pool_size or tokenizers,
    )
    return msgspec.structs.replace(config, server=server)
