"""Chat templates in the style of the families that write calls and thoughts each in its own way.

Written here from what the families' public documents say of their formats: roles, turns, the texts
around calls and thoughts. They are as short as a template can be that still shows them all.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """A template and what must be found in it.

    end: what ends an assistant's turn.  specials: texts that are special tokens.  opens: the prompt
    opens the thoughts.  thinks: there are some before the answer.
    """

    template: str
    tools: str
    reasoning: str | None
    end: str
    specials: tuple[str, ...] = ()
    opens: bool = False
    thinks: bool = False


def chatml(assistant: str, *, opening: str = "") -> str:
    """Return a template of ChatML turns, of which an assistant's holds *assistant*."""
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}" + assistant + "{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )


THOUGHTS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
TEXT = "{% if m.content %}{{ m.content }}\n{% endif %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"

QWEN3 = chatml(
    THOUGHTS + TEXT + EACH + '<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}}\n</tool_call>\n"
    "{% endfor %}",
    opening="{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
)
PARAMETERS = (
    "{% for k, v in f.arguments | items %}{OPEN}{{ k }}{MIDDLE}"
    "{{ v if v is string else v | tojson }}{CLOSE}{% endfor %}"
)


def parameters(opening: str, middle: str, closing: str) -> str:
    """Return the template of a call's parameters."""
    text = PARAMETERS.replace("{OPEN}", opening).replace("{MIDDLE}", middle)
    return text.replace("{CLOSE}", closing)


QWEN3_CODER = chatml(
    TEXT
    + EACH
    + "<tool_call>\n<function={{ f.name }}>\n"
    + parameters("<parameter=", ">\n", "\n</parameter>\n")
    + "</function>\n</tool_call>\n{% endfor %}"
)
GLM45 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ m.reasoning_content | default('') }}</think>\n{{ m.content }}\n"
    + EACH
    + "<tool_call>{{ f.name }}\n"
    + parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    + "</tool_call>\n{% endfor %}"
    "{% else %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{{ '<think></think>\n' if enable_thinking is false }}{% endif %}"
)


def deepseek(call: str, opening: str) -> str:
    """Return a template of DeepSeek's turns, whose calls look as *call*."""
    return (
        "<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% endif %}"
        + EACH
        + "<｜tool▁call▁begin｜>"
        + call
        + "<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}"
        "{% if m.tool_calls %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>"
        "{% else %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>" + opening + "{% endif %}"
    )


DEEPSEEK_V3 = deepseek(
    "{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```", ""
)
DEEPSEEK_R1 = deepseek(
    "{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```", "<think>\n"
)
DEEPSEEK_V31 = deepseek(
    "{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}", "{{ '<think>' if thinking else '</think>' }}"
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.content %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SEED_OSS = (
    "{% for m in messages %}<seed:bos>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}"
    "{{ m.content }}\n"
    + EACH
    + "<seed:tool_call>\n<function={{ f.name }}>\n"
    + parameters("<parameter=", ">", "</parameter>\n")
    + "</function>\n</seed:tool_call>\n{% endfor %}{% else %}{{ m.content }}{% endif %}<seed:eos>"
    "{% endfor %}{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}"
)
DEEPSEEK_V32 = (
    "{% set mark = '｜DSML｜' %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.reasoning_content | default('') }}</think>{{ m.content }}"
    "{% if m.tool_calls %}\n\n<{{ mark }}function_calls>{% for c in m.tool_calls %}\n"
    '<{{ mark }}invoke name="{{ c.function.name }}">\n'
    "{% for k, v in c.function.arguments | items %}"
    "<{{ mark }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</{{ mark }}parameter>\n{% endfor %}"
    "</{{ mark }}invoke>{% endfor %}\n</{{ mark }}function_calls>{% endif %}"
    "<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}<｜Assistant｜><think>{% endif %}"
    "{% endfor %}"
)
MINIMAX_M2 = (
    "{% if tools %}]~b]system\n{{ tools | tojson }}[e~[\n{% endif %}"
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}"
    + THOUGHTS
    + "{{ m.content }}\n{% if m.tool_calls %}<minimax:tool_call>\n"
    + EACH
    + '<invoke name="{{ f.name }}">\n'
    + parameters('<parameter name="', '">', "</parameter>\n")
    + "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    "{% else %}{{ m.content }}{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
LISTED = (
    '[{% for c in m.tool_calls %}{"name": {{ c.function.name | tojson }}, "arguments": '
    "{{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]"
)
MISTRAL = (
    "<s>{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' if tools }}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]" + LISTED + "{% endif %}</s>{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}Environment: ipython. Respond in the format "
    '{"name": function name, "parameters": dictionary of arguments}: {{ tools | tojson }}'
    "{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}" + EACH + '{"name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% endif %}"
)


def listed(opening: str, closing: str = "") -> str:
    """Return a template whose calls are one list of JSON between two texts."""
    calls = "{% if m.tool_calls %}" + opening + LISTED + closing + "{% endif %}"
    return chatml(THOUGHTS + TEXT + calls)


APRIEL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|begin_{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}Here are my reasoning steps:\n{{ m.reasoning_content }}\n"
    "[BEGIN FINAL RESPONSE]\n{{ m.content }}{% if m.tool_calls %}\n<tool_calls>"
    + LISTED
    + "</tool_calls>{% endif %}\n<|end|>\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin_assistant|>\nHere are my reasoning steps:\n{% endif %}"
)
COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ m.role | upper }}_TOKEN|>"
    "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>"
    "{% endif %}{{ m.content }}{% if m.tool_calls %}<|START_ACTION|>[\n{% for c in m.tool_calls %}"
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}\n{% endfor %}]<|END_ACTION|>"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|ASSISTANT_TOKEN|>{% endif %}"
)
PYTHON = (
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ SEPARATOR if not loop.last }}{% endfor %}"
)
LFM2 = chatml(
    TEXT + "{% if m.tool_calls %}<|tool_call_start|>["
    + PYTHON.replace("SEPARATOR", "', '") + "]<|tool_call_end|>{% endif %}"
)  # fmt: skip
OLMO3 = chatml(
    TEXT + "{% if m.tool_calls %}<function_calls>"
    + PYTHON.replace("SEPARATOR", "'\n'") + "</function_calls>{% endif %}"
)  # fmt: skip
GEMMA4 = (
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}"
    "{{ m.content }}" + EACH + "<|tool_call>call:{{ f.name ~ '{' }}"
    "{% for k, v in f.arguments | items %}{{ k }}:"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{{ ',' if not loop.last }}"
    "{% endfor %}}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)

DEEPSEEK_SPECIALS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
FAMILIES = {
    "qwen3": Family(QWEN3, "hermes", "think", "<|im_end|>", thinks=True),
    "qwen3_coder": Family(QWEN3_CODER, "qwen3_coder", None, "<|im_end|>"),
    "glm45": Family(GLM45, "glm45", "think", "", ("<|user|>", "<|assistant|>"), False, True),
    "deepseek_v3": Family(
        DEEPSEEK_V3, "deepseek_v3", "think", "<｜end▁of▁sentence｜>", DEEPSEEK_SPECIALS
    ),
    "deepseek_r1": Family(
        DEEPSEEK_R1, "deepseek_v3", "think", "<｜end▁of▁sentence｜>", DEEPSEEK_SPECIALS, True, True
    ),
    "deepseek_v31": Family(
        DEEPSEEK_V31, "deepseek_v3", "think", "<｜end▁of▁sentence｜>", DEEPSEEK_SPECIALS
    ),
    "deepseek_v32": Family(
        DEEPSEEK_V32, "deepseek_v32", "think", "<｜end▁of▁sentence｜>", DEEPSEEK_SPECIALS, True,
        True,
    ),
    "apriel": Family(APRIEL, "tool_calls", "apriel", "<|end|>", ("<|end|>",), True, True),
    "kimi_k2": Family(
        KIMI_K2, "kimi_k2", None, "<|im_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "gpt_oss": Family(
        GPT_OSS, "harmony", "harmony", "<|call|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
         "<|return|>"), False, True,
    ),
    "seed_oss": Family(SEED_OSS, "seed_oss", "seed_oss", "<seed:eos>", (), False, True),
    "minimax_m2": Family(MINIMAX_M2, "minimax_m2", "think", "[e~[", (), True, True),
    "magistral": Family(
        MISTRAL, "mistral", "mistral", "</s>",
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"), False, True,
    ),
    "llama3": Family(LLAMA3, "llama3_json", None, "<|eot_id|>", ("<|python_tag|>",)),
    "granite": Family(
        listed("<|tool_call|>"), "granite", "think", "<|im_end|>", ("<|tool_call|>",), False, True
    ),
    "nemotron": Family(
        listed("<TOOLCALL>", "</TOOLCALL>"), "nemotron", "think", "<|im_end|>", (), False, True
    ),
    "hunyuan": Family(
        listed("<tool_calls>", "</tool_calls>"), "tool_calls", "think", "<|im_end|>", (), False,
        True,
    ),
    "cohere": Family(
        COHERE, "cohere", "cohere", "<|END_OF_TURN_TOKEN|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        False, True,
    ),
    "lfm2": Family(LFM2, "lfm2", None, "<|im_end|>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": Family(OLMO3, "olmo3", None, "<|im_end|>"),
    "gemma4": Family(
        GEMMA4, "gemma4", "gemma4", "<turn|>",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'), False, True,
    ),
}  # fmt: skip
