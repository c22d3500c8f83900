"""The README's Python, as it stands: it runs, its types are right; and the flags it names exist."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from zlm import SamplingParams
from zlm.cli.accepted import ACCEPTED
from zlm.cli.parse import SPELLINGS
from zlm.frontend import exposition
from zlm.metrics import histogram_buckets
from zlm.unsupported import UNSUPPORTED

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
EXAMPLES = [
    code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "from zlm" in code
]
# Of vLLM's SamplingParams (0.13 to 0.19), what zlm has no use for, or not yet; a keyword that is
# neither is an error that names it.
NOT_HERE = {
    "logits_processors", "extra_args", "flat_logprobs", "skip_clone", "skip_reading_prefix_cache",
    "thinking_token_budget", "repetition_detection", "routed_experts_prompt_start",
}  # fmt: skip
VLLM_SAMPLING = NOT_HERE | {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens",
    "output_kind", "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words",
}  # fmt: skip


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2 and "LLM(" in EXAMPLES[0] and "AsyncLLM(" in EXAMPLES[1]


@pytest.mark.parametrize("code", EXAMPLES, ids=["LLM", "AsyncLLM"])
def test_an_example_runs(
    code: str, smollm2_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Verbatim but for the model, which is the same from another place."""
    assert HUB_ID in code
    program = tmp_path / "example.py"
    program.write_text(code.replace(HUB_ID, str(smollm2_path)))
    runpy.run_path(str(program), run_name="__main__")
    shown = capfd.readouterr().out
    if "AsyncLLM" in code:
        answers = ast.literal_eval(shown)
        assert len(answers) == 2 and all(answers) and answers[0] != answers[1]
    else:
        assert shown.startswith("The capital of France is → ") and "2 + 2 = → " in shown


def test_the_examples_types_are_right(tmp_path: Path) -> None:
    """As a user's own strict mypy sees them, and it does see a wrong type."""
    (tmp_path / "wrong.py").write_text(
        "from zlm import LLM, SamplingParams\n"
        'llm = LLM(model="m", max_num_seqs="many")\n'
        'llm.generate("a", SamplingParams(temperature="hot"))\n'
    )
    for number, code in enumerate(EXAMPLES):
        (tmp_path / f"example{number}.py").write_text(code)
    cache = ROOT / ".mypy_cache"
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(cache), *map(str, sorted(tmp_path.glob("*.py")))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2 and all("wrong.py" in line for line in errors), done.stdout
    assert '"max_num_seqs"' in errors[0] and '"temperature"' in errors[1]


def test_sampling_params_are_complete() -> None:
    ours = set(SamplingParams.__struct_fields__)
    assert ours == VLLM_SAMPLING - NOT_HERE
    for name in NOT_HERE:
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: None})  # type: ignore[arg-type]
    assert msgspec.convert(msgspec.to_builtins(SamplingParams()), SamplingParams).n == 1


def named_flags(text: str) -> set[str]:
    return {flag.rstrip("-") for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", text)} - {"--"}


def section(title: str) -> str:
    return README.partition(f"# {title}\n")[2].partition("\n## ")[0]


def test_every_flag_of_the_tables_is_one() -> None:
    """Of moving from vLLM, of tuning, of configuration and of troubleshooting."""
    for title in ("Coming from vLLM", "Tuning", "Configuration", "Troubleshooting"):
        flags = named_flags(section(title))
        assert len(flags) > 3, title
        known = {*SPELLINGS, *UNSUPPORTED, "--no"}
        # Of other programs: their own tests are elsewhere.
        assert flags - known <= {"--batch"}, (title, flags - known)
    refused = named_flags(section("Coming from vLLM")) & UNSUPPORTED.keys()
    assert refused == {"--data-parallel-size"}
    assert "--swap-space" in {row.flag for row in ACCEPTED}


def test_every_metric_that_is_named_is_one() -> None:
    source = Path(exposition.__file__).read_text()
    known = {f"vllm:{name}" for name in histogram_buckets(1024)}
    names = set(re.findall(r"`((?:vllm|zlm):[a-z_]+)", section("Tuning")))
    assert len(names) > 6
    for name in names:
        assert name in known or name.removesuffix("_total") in source, name
