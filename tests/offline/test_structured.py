"""Structured output offline: SamplingParams(structured_outputs=...)."""

import json
import re

import jsonschema
import pytest

from zlm import LLM, SamplingParams, StructuredOutputsParams
from zlm.errors import BadRequest

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def params(**form) -> SamplingParams:
    outputs = StructuredOutputsParams(**form)
    return SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=outputs)


def test_every_prompt_has_its_own_form(llm: LLM) -> None:
    asked = [params(json=SCHEMA), params(regex="[a-z]{3}"), params(choice=["ja", "nej"])]
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    outputs = llm.generate(["Say:"] * 4, [*asked, plain], use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch("[a-z]{3}", texts[1]) and texts[2] in ("ja", "nej")
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "stop", "stop", "length"]


def test_a_bad_form_is_refused_before_anything_runs(llm: LLM) -> None:
    """CASES 75."""
    with pytest.raises(
        BadRequest, match=r"prompt 1: the regex does not compile: .*unclosed"
    ) as bad:
        llm.generate(["a", "b"], [params(regex="a"), params(regex="(a")], use_tqdm=False)
    assert bad.value.param == "structured_outputs"
    with pytest.raises(BadRequest, match="exactly one of"):
        llm.generate("a", params(regex="a", choice=["b"]), use_tqdm=False)
    assert llm.generate("a", params(choice=["b"]), use_tqdm=False)[0].outputs[0].text == "b"
