"""How many front ends and tokenizers a server gets."""

import pytest

from zlm.config import Config, ModelOptions, ServerOptions
from zlm.supervisor.process_counts import with_process_counts


def counts(device: str, num_cpus: int, server: ServerOptions) -> tuple[int | None, int | None]:
    config = Config(model=ModelOptions(model="m"), server=server)
    server = with_process_counts(config, device, num_cpus).server
    return server.api_server_count, server.tokenizer_pool_size


@pytest.mark.parametrize(
    ("device", "num_cpus", "expected"),
    [
        ("cpu", 2, (1, 1)),
        ("cpu", 64, (1, 1)),
        ("cuda", 1, (1, 1)),
        ("cuda", 2, (1, 1)),
        ("cuda", 8, (2, 1)),
        ("cuda", 16, (4, 2)),
        ("cuda", 128, (4, 4)),
    ],
)
def test_defaults(device: str, num_cpus: int, expected: tuple[int, int]) -> None:
    assert counts(device, num_cpus, ServerOptions()) == expected


def test_what_the_user_says_stands() -> None:
    assert counts("cuda", 16, ServerOptions(api_server_count=1)) == (1, 2)
    assert counts("cpu", 2, ServerOptions(tokenizer_pool_size=3, port=1)) == (1, 3)
