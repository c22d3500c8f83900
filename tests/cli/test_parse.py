"""serve's flags: every one reaches its field; files, environment; what is told of wrong ones.

CASES 65 (names) and 92 (keys from the environment), as far as the command line goes.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from zlm.api_keys import ApiKey, api_key, read_key_file
from zlm.cli.accepted import ACCEPTED
from zlm.cli.argument import Argument
from zlm.cli.arguments import ARGUMENTS, changed
from zlm.cli.parse import SPELLINGS, parse
from zlm.config import Config, ModelOptions
from zlm.errors import ConfigError
from zlm.unsupported import UNSUPPORTED

KEY_FILE = str(Path(__file__).with_name("keys.txt"))
BESIDE = {  # flag → those without which it means nothing
    "--ssl-keyfile": ["--ssl-certfile", __file__],
    "--ssl-ca-certs": ["--ssl-certfile", __file__],
    "--ssl-ciphers": ["--ssl-certfile", __file__],
    "--ssl-cert-reqs": ["--ssl-certfile", __file__, "--ssl-ca-certs", __file__],
    "--nnodes": ["--master-addr", "gpu1", "-tp", "2"],
    "--node-rank": ["--nnodes", "2", "--master-addr", "gpu1", "-tp", "2"],
    "--headless": ["--nnodes", "2", "--node-rank", "1", "--master-addr", "gpu1", "-tp", "2"],
    "--master-addr": ["--nnodes", "2", "-tp", "2"],
    "--master-port": ["--nnodes", "2", "--master-addr", "gpu1", "-tp", "2"],
    "--cluster-key": ["--nnodes", "2", "--master-addr", "gpu1", "-tp", "2"],
}

# Text of each flag that is no switch, and the value that it must become.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "--tokenizer": (["org/tok"], "org/tok"),
    "--revision": (["v2"], "v2"),
    "--download-dir": (["/opt/models"], "/opt/models"),
    "--dtype": (["half"], "half"),
    "--max-model-len": (["8k"], 8000),
    "--served-model-name": (["a", "b"], ("a", "b")),
    "--load-format": (["gguf"], "gguf"),
    "--task": (["embedding"], "embedding"),
    "--runner": (["pooling"], "pooling"),
    "--convert": (["embed"], "embed"),
    "--quantization": (["awq"], "awq"),
    "--generation-config": (["none"], "none"),
    "--tool-call-parser": (["hermes"], "hermes"),
    "--reasoning-parser": (["qwen3"], "qwen3"),
    "--chat-template": (["{{ messages }}"], "{{ messages }}"),
    "--seed": (["-1"], -1),
    "--block-size": (["32"], 32),
    "--gpu-memory-utilization": (["0.8"], 0.8),
    "--kv-cache-dtype": (["bfloat16"], "bfloat16"),
    "--kv-cache-memory-bytes": (["512MiB"], 2**29),
    "--num-gpu-blocks-override": (["100"], 100),
    "--max-num-seqs": (["1"], 1),
    "--max-num-batched-tokens": (["2K"], 2048),
    "--scheduling-policy": (["priority"], "priority"),
    "--run-ahead-steps": (["1"], 1),
    "--device": (["cuda"], "cuda"),
    "--attention-backend": (["sdpa"], "sdpa"),
    "--tensor-parallel-size": (["1"], 1),
    "--pipeline-parallel-size": (["2"], 2),
    "--cpu-threads": (["2"], 2),
    "--nnodes": (["2"], 2),
    "--node-rank": (["1"], 1),
    "--master-addr": (["10.0.0.1"], "10.0.0.1"),
    "--master-port": (["30000"], 30000),
    "--cluster-key": ([KEY_FILE], KEY_FILE),
    "--distributed-executor-backend": (["ray"], "ray"),
    "--host": (["0.0.0.0"], "0.0.0.0"),
    "--port": (["8001"], 8001),
    "--uds": (["/run/zlm.sock"], "/run/zlm.sock"),
    "--api-key": (["k1"], (api_key("k1"),)),
    "--admin-api-key": (["k2"], (api_key("k2", admin=True),)),
    "--api-key-file": ([KEY_FILE], KEY_FILE),
    "--ssl-certfile": ([__file__], __file__),
    "--ssl-keyfile": ([__file__], __file__),
    "--ssl-ca-certs": ([__file__], __file__),
    "--ssl-cert-reqs": (["1"], "optional"),
    "--ssl-ciphers": (["ECDHE+AESGCM"], "ECDHE+AESGCM"),
    "--max-waiting-queue-length": (["100"], 100),
    "--request-timeout": (["60"], 60.0),
    "--max-connections": (["100"], 100),
    "--max-n": (["4"], 4),
    "--max-stop-strings": (["4"], 4),
    "--max-stop-length": (["32"], 32),
    "--max-logit-bias": (["10"], 10),
    "--max-bad-words": (["0"], 0),
    "--max-logprobs": (["5"], 5),
    "--root-path": (["/llm"], "/llm"),
    "--allowed-origins": (['["https://a", "https://b"]'], ("https://a", "https://b")),
    "--api-server-count": (["2"], 2),
    "--tokenizer-pool-size": (["3"], 3),
    "--shutdown-timeout": (["1.5"], 1.5),
    "--health-timeout": (["5"], 5.0),
    "--hang-timeout": (["30"], 30.0),
    "--startup-timeout": (["900"], 900.0),
    "--max-restarts": (["0"], 0),
    "--unknown-fields": (["ignore"], "ignore"),
    "--max-body-bytes": (["1MB"], 1_000_000),
    "--max-body-memory": (["64MiB"], 2**26),
    "--max-header-bytes": (["8KiB"], 8192),
    "--max-header-count": (["64"], 64),
    "--body-timeout": (["10"], 10.0),
    "--keep-alive-timeout": (["5"], 5.0),
    "--max-prompts": (["8"], 8),
    "--max-concurrent-requests": (["16"], 16),
    "--template-timeout": (["2"], 2.0),
    "--grammar-timeout": (["2"], 2.0),
    "--log-format": (["json"], "json"),
    "--otlp-traces-endpoint": (
        ["http://127.0.0.1:4318/v1/traces"],
        "http://127.0.0.1:4318/v1/traces",
    ),
}


def config_of(*words: str, environment: dict[str, str] | None = None) -> Config:
    return parse(["M", *words], environment or {})[0]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(words, {})
    return caught.value.message


def leaf_fields(kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    paths = []
    for field in msgspec.structs.fields(kind):
        path = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            paths += leaf_fields(field.type, path + ".")
        else:
            paths.append(path)
    return paths


def test_every_option_has_exactly_one_flag() -> None:
    fields = [row.field for row in ARGUMENTS] + ["model.model"]
    assert sorted(fields) == sorted(leaf_fields(Config))


def test_flags_of_guides_to_tool_calls_work() -> None:
    words = ["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-reasoning"]
    config, notes = parse([*words, "--reasoning-parser", "deepseek_r1"])
    assert config.server.tool_call_parser == "hermes"
    assert config.server.reasoning_parser == "deepseek_r1"
    assert [note.partition(":")[0] for note in notes] == [words[1], words[4]]


def test_spellings_are_unique_and_none_is_called_unsupported() -> None:
    rows = (*ARGUMENTS, *ACCEPTED)
    names = [name for row in rows for name in (row.flag, *row.spellings)]
    assert len(names) == len(set(names))
    assert not set(SPELLINGS) & set(UNSUPPORTED)


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: row.flag)
def test_every_flag_reaches_its_field(row: Argument, tmp_path: Path) -> None:
    beside = BESIDE.get(row.flag, [])
    if row.is_switch:
        no = "--no-" + row.flag.removeprefix("--")
        for off in (no, *row.off, f"{row.flag}=false"):
            assert row.value_in(config_of(off, *beside)) is False
        for on in (row.flag, f"{row.flag}=true", f"{no}=false"):
            assert row.value_in(config_of(on, *beside)) is True
        return
    words, expected = EXAMPLES[row.flag]
    plain = Config(model=ModelOptions(model="M"))
    forms = [[row.flag, *words], [row.flag.replace("_", "-"), *words]]
    forms += [[name, *words] for name in row.spellings]
    forms += [["--" + row.flag[2:].replace("-", "_"), *words]]
    forms += [[f"{row.flag}={words[0]}"]] if len(words) == 1 else []
    for form in forms:
        config = config_of(*form, *beside)
        assert row.value_in(config) == expected
        if expected != row.value_in(plain):
            assert len(changed(config)) == 1 + len(beside) // 2
    file = tmp_path / "zlm.yaml"
    key = row.flag.removeprefix("--")
    value: Any = words if len(words) > 1 else words[0]
    file.write_bytes(msgspec.yaml.encode({"model": "M", key: value, "enable_prefix_caching": True}))
    from_file, _ = parse(["--config", str(file), *beside], {})
    assert row.value_in(from_file) == expected


def test_without_flags_all_is_as_config_has_it() -> None:
    assert config_of() == Config(model=ModelOptions(model="M"))


@pytest.mark.parametrize(
    "words", ["M", "--model M", "--model=M", "--port 1 M", "-- M", "M --model M"]
)
def test_the_model_may_be_given_in_either_way(words: str) -> None:
    assert parse(words.split(), {})[0].model.model == "M"


def test_the_guides_commands_are_taken() -> None:
    home = (
        "google/gemma-3-270m-it --host 0.0.0.0 --port 8000 --max-model-len 2048 --max-num-seqs 1 "
        "--gpu-memory-utilization 0.80 --swap-space 2 --download-dir /opt/models "
        "--trust-remote-code"
    )
    config, notes = parse(home.split(), {})
    assert config.model.download_dir == "/opt/models" and config.scheduler.max_num_seqs == 1
    assert [note.partition(":")[0] for note in notes] == ["--swap-space", "--trust-remote-code"]
    chatbot = (
        "M --gpu-memory-utilization 0.90 --enable-prefix-caching --enable-chunked-prefill "
        "--max-model-len 8192 --max-num-seqs 64 --disable-log-requests --enforce-eager"
    )
    config, notes = parse(chatbot.split(), {})
    assert not config.server.log_requests and config.compute.enforce_eager and not notes
    assert parse(["M", "--pipeline-parallel-size", "1", "-tp", "1", "--task", "generate"], {})[0]


@pytest.mark.parametrize("word", ["auto", "-1"])
def test_max_model_len_auto(word: str) -> None:
    assert config_of("--max-model-len", word).model.max_model_len == "auto"


@pytest.mark.parametrize(
    ("given", "name"),
    [("TRITON_ATTN", "triton"), ("TORCH_SDPA", "sdpa"), ("Triton", "triton"), ("auto", "auto")],
)
def test_attention_backends_by_either_name(given: str, name: str) -> None:
    assert config_of("--attention-backend", given).compute.attention_backend == name


def test_served_names_case_65() -> None:
    assert config_of("--served-model-name", "a", "b").model.served_model_name == ("a", "b")
    config, notes = parse(["M", "--served-model-name", "a b c"], {})
    assert config.model.served_model_name == ("a", "b", "c")
    assert notes == []
    message = refusal("--served-model-name", "a", "M")
    assert message == "no model is given: zlm serve MODEL, with MODEL before all flags"


def keys(*texts: str, admin: bool = False) -> tuple[ApiKey, ...]:
    return tuple(api_key(text, admin=admin) for text in texts)


def test_keys_case_92(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nkey-2\n\n  key-3  # Ann\nkey-1\n")
    words = ["--api-key", "key-1", "--api-key-file", str(file), "--api-key", "key-0"]
    config = config_of(*words, environment={"ZLM_API_KEY": "key-4"})
    assert config.server.api_keys == keys("key-1", "key-0", "key-4")
    assert config.server.api_key_file == str(file)
    assert read_key_file(str(file)) == keys("key-2", "key-3", "key-1")
    assert config.server.asks_for_keys
    assert config_of(environment={"ZLM_API_KEY": "key-4"}).server.api_keys == keys("key-4")
    assert not config_of(environment={"ZLM_API_KEY": ""}).server.asks_for_keys
    assert changed(config) == ["--api-key ...", f"--api-key-file {file}"]


def test_credentials_in_urls_are_not_shown() -> None:
    config = config_of("--otlp-traces-endpoint", "http://user:pass@host:4318/v1/traces")
    assert changed(config) == ["--otlp-traces-endpoint http://...@host:4318/v1/traces"]


def test_a_wrong_key_is_not_shown() -> None:
    for words in (["--api-key", "se cret"], ["--api-key", "sécret"], ["--api-key="]):
        message = refusal("M", *words)
        assert message.startswith("--api-key") and "cret" not in message


def test_file_gives_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "zlm.yaml"
    file.write_text(
        "model: from-file\nport: 9000\nmax_num_seqs: 8\nno-enable-prefix-caching: true\n"
        "served-model-name: [a, b]\nswap-space: 2\ngpu-memory-utilization: 0.5\n"
        "api-key:\n  - k1\n  - k2\nenable-chunked-prefill: false\n"
    )
    words = ["--port", "1", "M", "--config", str(file), "--served-model-name", "c"]
    config, notes = parse(words, {})
    assert config.model.model == "M" and config.server.port == 1
    assert config.model.served_model_name == ("c",)
    assert config.scheduler.max_num_seqs == 8 and config.cache.gpu_memory_utilization == 0.5
    assert not config.cache.enable_prefix_caching and not config.scheduler.enable_chunked_prefill
    assert config.server.api_keys == keys("k1", "k2")
    assert len(notes) == 1 and notes[0].startswith("--swap-space:")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1", "unknown flag --prot; did you mean --port?"),
        ("port: ", "--port must be a string, a number, true, false or a list"),
        ("port: [1, 2]", "--port takes one value, got 2"),
        ("port: many", "--port must be a whole number, got 'many'"),
        ("enable-lora: true", "--enable-lora is a flag of vLLM that zlm does not have"),
        ("config: other.yaml", "--config cannot be given in a file"),
        ("enable-prefix-caching: maybe", "--enable-prefix-caching must be true or false"),
        ("- port", "must be a mapping of flags to values"),
        ("port: [", "line 1, column 8: expected the node"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "zlm.yaml"
    file.write_text(content)
    message = refusal("M", "--config", str(file))
    assert words in message and str(file) in message


@pytest.mark.parametrize("flag", ["--config", "--api-key-file"])
def test_missing_files_are_told(flag: str) -> None:
    message = refusal("M", flag, "/nonexistent")
    assert message.startswith(f"{flag} /nonexistent: ") and "No such file" in message


def test_a_key_file_without_keys_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    assert "there is no key in it" in refusal("M", "--api-key-file", str(file))


UNKNOWN = "unknown flag "
LACKING = " is a flag of vLLM that zlm does not have: "
WRONG = [
    ("--max-model-length 1", UNKNOWN + "--max-model-length; did you mean --max-model-len?"),
    (
        "--no-enable-prefix-cachin",
        UNKNOWN + "--no-enable-prefix-cachin; did you mean --no-enable-prefix-caching?",
    ),
    ("--zzzzzz", UNKNOWN + "--zzzzzz"),
    ("-x", UNKNOWN + "-x"),
    ("-O3", UNKNOWN + "-O3"),
    ("-O 3", "-O" + LACKING + "nothing is compiled"),
    ("--ssl-keyfile /k", "--ssl-keyfile cannot be read: No such file or directory, got '/k'"),
    ("--ssl-cert-reqs 2", "--ssl-cert-reqs required needs --ssl-ca-certs"),
    ("--max-logprobs 21", "--max-logprobs must be between 0 and 20, got 21"),
    ("--request-timeout 0", "--request-timeout must be between 0.001 and 86400, got 0.0"),
    ("--no-enable-lora", "--no-enable-lora" + LACKING + "adapters"),
    ("--data_parallel_size 2", "--data-parallel-size" + LACKING + "zlm runs one engine"),
    ("--port", "--port needs a value: --port PORT"),
    ("--port --host h", "--port needs a value: --port PORT"),
    ("--port x", "--port must be a whole number, got 'x'"),
    ("--port 65536", "--port must be between 0 and 65535, got 65536"),
    ("--port -1", "--port must be between 0 and 65535, got -1"),
    (
        "--gpu-memory-utilization 90",
        "--gpu-memory-utilization must be over 0 and at most 1, got 90.0",
    ),
    (
        "--gpu-memory-utilization nan",
        "--gpu-memory-utilization must be a finite number, got 'nan'",
    ),
    ("--dtype int8", "--dtype must be one of auto, float32, bfloat16, float16, float, half"),
    (
        "--kv-cache-dtype fp8_e5m2",
        "--kv-cache-dtype must be one of auto, float32, bfloat16, float16",
    ),
    (
        "--kv-cache-memory-bytes 8XB",
        "--kv-cache-memory-bytes must be a number of bytes such as 1073741824, 8GB or 512MiB",
    ),
    ("--block-size 24", "--block-size must be a power of two, got 24"),
    ("--chat-template t.jinja", "--chat-template must be a template or the path of a file"),
    ("--allowed-origins [1]", "--allowed-origins must be a string or a JSON list of strings"),
    ("--task reward", "--task must be one of auto, generate, embedding, embed, classify, score"),
    ("--swap-space much", "--swap-space must be a number, got 'much'"),
    ("--tensor-parallel-size 0", "--tensor-parallel-size must be between 1 and 64, got 0"),
    ("-pp two", "-pp must be a whole number, got 'two'"),
    ("-pp 0", "--pipeline-parallel-size must be between 1 and 64, got 0"),
    ("--device tpu", "--device must be one of auto, cpu, cuda, got 'tpu'"),
    (
        "--attention-backend FLASH_ATTN",
        "--attention-backend must be one of auto, triton, sdpa: zlm has attention kernels of its",
    ),
    ("--attention-backend fast", "--attention-backend must be one of auto, triton, sdpa, got"),
    ("--served-model-name a a", "--served-model-name has a name twice: a, a"),
    ("--root-path llm", "--root-path must start with /, got llm"),
    ("second", "unexpected 'second' after the model 'M'"),
    ("--model other", "two models are given: M and --model other"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_flags_are_told(words: str, message: str) -> None:
    assert refusal("M", *words.split()).startswith(message)


def test_no_model_is_told() -> None:
    assert refusal().startswith("no model is given")
    assert refusal("--model", "").startswith("--model must not be empty")


def test_long_values_are_cut_in_messages() -> None:
    assert len(refusal("M", "--port", "9" * 3000 + "x")) < 300
