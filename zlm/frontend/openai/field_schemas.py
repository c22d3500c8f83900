"""The schemas of request fields whose types say only that they are JSON. Pure data."""

from zlm.frontend.openai import fields, messages, tools
from zlm.frontend.openai.operation import Json
from zlm.sampling_params import StructuredOutputsParams

_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": ["string", "null"]}
STREAM_OPTIONS: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {name: {"type": ["boolean", "null"]} for name in fields.STREAM_OPTIONS},
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
_CALL: Json = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["function"],
}
MESSAGES: Json = {
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": [*messages.ROLES]},
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "tool_calls": {"type": "array", "items": _CALL},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "type": {"enum": ["text"]},
                                "text": {"type": "string"},
                            },
                            "required": ["type", "text"],
                        },
                    },
                ]
            },
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
}

RESPONSE_FORMAT: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": _TEXT,
                        "description": _TEXT,
                        "schema": {"type": ["object", "boolean"], "description": "JSON schema."},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
        _NULL,
    ]
}
_FORMS: Json = {
    "json": {"type": ["object", "string", "boolean"], "description": "A JSON schema."},
    "json_object": {"const": True, "description": "Any JSON object."},
    "regex": {"type": "string", "description": "What the whole output matches."},
    "choice": {"type": "array", "minItems": 1, "items": {"type": "string"}},
    "grammar": {"type": "string", "description": "Lark, or EBNF."},
}
_BESIDE: Json = {
    "disable_any_whitespace": {"type": ["boolean", "null"]},
    "whitespace_pattern": _TEXT,
}
assert set(_FORMS) | set(_BESIDE) <= set(StructuredOutputsParams.__struct_fields__)
STRUCTURED_OUTPUTS: Json = {
    "anyOf": [
        *(
            {
                "type": "object",
                "properties": {form: schema, **_BESIDE},
                "required": [form],
                "additionalProperties": False,
            }
            for form, schema in _FORMS.items()
        ),
        _NULL,
    ]
}
_NAMED: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
TOOLS: Json = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": tools.MAX_TOOLS,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
                            "description": _TEXT,
                            "parameters": {"type": ["object", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                        },
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            },
        },
        _NULL,
    ]
}
TOOL_CHOICE: Json = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _NULL]}
