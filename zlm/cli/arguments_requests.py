"""The flags of serve that say what requests may do: the last group of ``arguments``."""

from zlm.cli import values
from zlm.cli.argument import Argument
from zlm.config import REASONING_PARSERS, TOOL_CALL_PARSERS

REQUESTS = (
    Argument(
        flag="--tool-call-parser",
        field="server.tool_call_parser",
        metavar="FORMAT",
        parse=values.choice(*TOOL_CALL_PARSERS),
        help=f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}",
        default="what the chat template shows",
    ),
    Argument(
        flag="--reasoning-parser",
        field="server.reasoning_parser",
        metavar="FORMAT",
        parse=values.choice(*REASONING_PARSERS),
        help=f"how the model marks its thoughts: {', '.join(REASONING_PARSERS)}",
        default="what the chat template shows",
    ),
    Argument(
        flag="--unknown-fields",
        field="server.unknown_fields",
        metavar="HOW",
        parse=values.choice("reject", "ignore"),
        help="unknown fields of a request: reject or ignore",
    ),
    Argument(
        flag="--clamp-max-tokens",
        field="server.clamp_max_tokens",
        help="cut a max_tokens that is larger than the room left, rather than refuse it",
    ),
    Argument(
        flag="--allow-special-tokens-in-content",
        field="server.allow_special_tokens_in_content",
        help="let users type control tokens",
    ),
    Argument(
        flag="--trust-request-chat-template",
        field="server.trust_request_chat_template",
        help="let requests bring chat templates; a slow one holds up its tokenizer process",
    ),
    Argument(
        flag="--max-body-bytes",
        field="server.limits.max_body_bytes",
        metavar="SIZE",
        parse=values.size_bytes,
        help="largest body of a request",
    ),
    Argument(
        flag="--max-header-bytes",
        field="server.limits.max_header_bytes",
        metavar="SIZE",
        parse=values.size_bytes,
        help="largest request line and headers",
    ),
    Argument(
        flag="--max-header-count",
        field="server.limits.max_header_count",
        metavar="N",
        parse=values.integer,
        help="most headers of a request",
    ),
    Argument(
        flag="--body-timeout",
        field="server.limits.body_timeout_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a client may take to send a request",
    ),
    Argument(
        flag="--keep-alive-timeout",
        field="server.limits.keep_alive_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long an idle connection stays open",
    ),
    Argument(
        flag="--max-prompts",
        field="server.limits.max_prompts",
        metavar="N",
        parse=values.integer,
        help="most prompts in one request",
    ),
    Argument(
        flag="--max-concurrent-requests",
        field="server.limits.max_concurrent_requests",
        metavar="N",
        parse=values.integer,
        help="open requests a front end holds before it answers 503",
    ),
    Argument(
        flag="--template-timeout",
        field="server.limits.template_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a chat template may run",
    ),
    Argument(
        flag="--grammar-timeout",
        field="server.limits.grammar_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a grammar of structured output may take to compile",
    ),
)
