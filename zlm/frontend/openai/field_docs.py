"""What /openapi.json says of each request field beside its type: a sentence, and its limits.

By field name, for all endpoints alike; limits are those that are enforced elsewhere, taken from the
same constants and the server's own configuration. Pure data.
"""

from typing import Any

from zlm.frontend.openai.fields import MAX_TIMEOUT_SECONDS
from zlm.pooling_params import MAX_PROMPT_NAME_CHARACTERS
from zlm.sampling_params import MAX_STOP_TOKEN_IDS, SamplingLimits

_INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
_COUNT = {"minimum": 0, "maximum": 2**31 - 1}
TOKEN_ID = "token-id"  # format of integers that the vocabulary limits
_TOKEN_IDS = {"minimum": 0, "format": TOKEN_ID}

DESCRIPTIONS = {
    "model": "A served name (see /v1/models); absent: the first of them.",
    "prompt": "A string, a list of strings, of token ids, or of lists of token ids.",
    "messages": "The conversation: each message has a role and a content of text.",
    "stream": "Send the answer as server-sent events while it is made.",
    "stream_options": "include_usage: one more chunk with the usage before the end. "
    "continuous_usage_stats: the usage so far in every chunk. Needs stream: true.",
    "n": "Answers to make for each prompt.",
    "temperature": "0 is greedy. Absent: what the model's generation_config.json says, else 1.",
    "top_p": "Draw from the fewest tokens with so much probability; 1 is off, 0 keeps the best.",
    "top_k": "Draw from so many likeliest tokens; -1 and 0 are off.",
    "min_p": "Drop tokens less likely than this share of the likeliest.",
    "presence_penalty": "Subtracted from the logits of tokens that the output has.",
    "frequency_penalty": "Subtracted from a token's logit for each time that the output has it.",
    "repetition_penalty": "Divides logits of tokens in prompt and output; 1 is off.",
    "seed": "Fixes the tokens drawn, whatever else the server does.",
    "max_tokens": "Most tokens of an answer. Absent: 16 for completions, else what there is room "
    "for. 0 only with echo.",
    "max_completion_tokens": "The newer name of max_tokens; wins over it.",
    "min_tokens": "No end token, stop id or stop string ends the answer before so many tokens.",
    "stop": "Strings that end the answer and are left out of it.",
    "stop_token_ids": "Token ids that end the answer.",
    "bad_words": "Words that are never produced.",
    "include_stop_str_in_output": "Leave the stop string, or the text of the token that ended the "
    "answer, in it.",
    "ignore_eos": "Go on past the model's end tokens.",
    "logprobs": "Completions: likeliest tokens to tell beside each token. Chat: true tells the "
    "tokens' log-probabilities.",
    "top_logprobs": "Likeliest tokens to tell beside each token; needs logprobs: true.",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "logit_bias": "Token id to what is added to its logit, -100 to 100.",
    "allowed_token_ids": "The only token ids that may be produced.",
    "skip_special_tokens": "Leave special tokens out of the text; true unless false is given.",
    "spaces_between_special_tokens": "Accepted; special tokens are written as they are.",
    "truncate_prompt_tokens": "Keep only so many last tokens of the prompt; -1 keeps what fits.",
    "echo": "The prompt's text precedes the answer (chat: that of a continued message).",
    "add_special_tokens": "Let the tokenizer add its BOS token: completions do, chats do not.",
    "return_token_ids": "Tell the ids of the prompt and of the answer's tokens.",
    "return_tokens_as_token_ids": "In log-probabilities, write tokens as token_id:N.",
    "priority": "Lower runs earlier under --scheduling-policy priority.",
    "cache_salt": "Requests share cached prefixes only with equal salts.",
    "request_id": "Names the request in the log, where no X-Request-Id header does.",
    "timeout": "Seconds that the answer may take; then the request ends with status 504.",
    "add_generation_prompt": "Begin the assistant's turn; true unless false is given.",
    "continue_final_message": "The answer goes on from the last message, which stays open.",
    "chat_template": "A Jinja template; taken only with --trust-request-chat-template.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "documents": "Given to the chat template as documents.",
    "reasoning_effort": "none, minimal, low, medium, high, xhigh or max: given to the chat "
    "template as reasoning_effort.",
    "user": "Accepted, changes nothing.",
    "metadata": "Accepted, changes nothing.",
    "store": "Accepted; nothing is stored.",
    "service_tier": "Accepted, changes nothing.",
    "safety_identifier": "Accepted, changes nothing.",
    "prompt_cache_key": "Accepted; prefixes are always cached.",
    "prompt_cache_retention": "Accepted, changes nothing.",
    "parallel_tool_calls": "False: one call at most.",
    "prediction": "Accepted, changes nothing.",
    "tokens": "Token ids.",
    "return_token_strs": "Also tell each token as the vocabulary writes it.",
    "input": "A string, a list of strings, of token ids, or of lists of token ids.",
    "encoding_format": "float, or base64 of little-endian float32.",
    "dimensions": "Keep so many first elements of each vector, where the model is made for it.",
    "normalize": "Bring vectors to length 1; absent: as the model says.",
    "prompt_name": "Which of the model's own prompts precedes each input.",
    "task": "embed or classify: of the whole input; token_embed or token_classify: of each token. "
    "Absent: what the model was made for.",
    "use_activation": "Apply the model's function to the logits of labels.",
    "text_1": "One text, or as many as text_2 has.",
    "text_2": "The texts to score against text_1.",
    "queries": "Another name of text_1.",
    "query": "What the documents are ranked by.",
    "top_n": "Tell only so many best documents; 0: all.",
    "return_documents": "Repeat the documents' texts in the answer.",
    "best_of": "Only the value of n, which asks for nothing.",
    "response_format": "The form of the answer: text, json_object, or json_schema with a schema.",
    "structured_outputs": "The form of the answer: exactly one of json, json_object, regex, "
    "choice and grammar.",
    "tools": "Functions that the model may call. Calls of one that is strict fit its parameters, "
    "where the model's format can be held to that.",
    "tool_choice": "none, auto, required, or the function to call; absent: auto.",
    "include_reasoning": "False leaves a model's thoughts out of the answer.",
}

LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": _INT64,
    "priority": _INT64,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": _COUNT,
    "truncate_prompt_tokens": {"minimum": -1, "maximum": 2**31 - 1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": _TOKEN_IDS},
    "allowed_token_ids": {"minItems": 1, "items": _TOKEN_IDS},
    "tokens": {"items": _TOKEN_IDS},
    "cache_salt": {"maxLength": 256},
    "messages": {"minItems": 1},
    "timeout": {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_SECONDS},
    "dimensions": {"minimum": 1, "maximum": 2**31 - 1},
    "prompt_name": {"maxLength": MAX_PROMPT_NAME_CHARACTERS},
    "top_n": {"minimum": 0},
}


def limits_of(server: SamplingLimits) -> dict[str, dict[str, Any]]:
    """Return the limits of all fields, *server*'s own among them."""
    samples = {"minimum": 1, "maximum": server.max_n}
    alternatives = {"minimum": 0, "maximum": server.max_logprobs}
    return LIMITS | {
        "n": samples,
        "best_of": samples,
        "logprobs": alternatives,
        "top_logprobs": alternatives,
        "prompt_logprobs": alternatives,
        "stop": {
            "maxItems": server.max_stop_strings,
            "minLength": 1,
            "maxLength": server.max_stop_characters,
            "items": {"minLength": 1, "maxLength": server.max_stop_characters},
        },
        "bad_words": {"maxItems": server.max_bad_words, "items": {"minLength": 1}},
        "logit_bias": {
            "maxProperties": server.max_logit_bias,
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"minimum": -100, "maximum": 100},
        },
    }
