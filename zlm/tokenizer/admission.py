"""From a ``Generate`` to what the engine is asked: renders, encodes, and checks everything.

A request that leaves here cannot hurt the engine: its ids are in the vocabulary, its lengths fit.
All prompts of a request are checked before any is handed on. Owns no state of requests, only the
limits, which the engine may lower when it is ready.
"""

import logging
from dataclasses import dataclass

from zlm.config import Resolved
from zlm.errors import BadRequest, TooLong
from zlm.messages import ChatPrompt, Generate, SamplingSpec
from zlm.sampling_params import SamplingParams
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.choice import ChoiceOptions, Prompt
from zlm.tokenizer.lengths import check_prompt, context_length, output_tokens
from zlm.tokenizer.sampling import SeedSource, check_ids, sampling_spec, unsigned_seed
from zlm.tokenizer.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request. ``prompts``, ``max_tokens`` and ``seeds`` have one entry a prompt."""

    prompts: list[Prompt]
    max_tokens: list[int]
    seeds: list[int]
    sampling: SamplingSpec  # with seed 0
    options: ChoiceOptions
    continues: bool  # the output goes on from the prompt's text


class Admission:
    """Checks requests against one model's vocabulary and limits."""

    def __init__(
        self, resolved: Resolved, owner: int, vocabulary: Vocabulary, renderer: ChatRenderer
    ) -> None:
        self.max_sequence_tokens: int | None = None  # what the KV cache can hold, when known
        self._resolved = resolved
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._seeds = SeedSource(resolved.config.model.seed, owner)
        self._warned_of_bos = False

    def admit(self, message: Generate) -> Admitted:
        """Return the checked request; raises BadRequest or TooLong naming the field and limit."""
        params = message.params
        params.check(self._resolved.config.server.limits.sampling)
        if params.max_tokens == 0 and not message.echo and params.prompt_logprobs is None:
            field = message.max_tokens_field
            raise BadRequest(f"{field} must be at least 1 without echo", param=field)
        if params.stop_strings() and not params.detokenize:
            raise BadRequest("stop needs detokenize to be true", param="stop")
        without_text = self._resolved.config.model.skip_tokenizer_init
        if without_text and params.stop_strings():
            raise BadRequest("stop needs a tokenizer: --skip-tokenizer-init is set", param="stop")
        options = _options(message, return_token_ids=message.return_token_ids or without_text)
        sampling = sampling_spec(
            params,
            self._resolved.spec,
            self._vocabulary,
            prompt_logprobs=_engine_prompt_logprobs(options),
        )
        prompts = self._prompts(message)
        max_tokens = [self._output_tokens(message, prompt) for prompt in prompts]
        seeds = [self._seed(params) for _ in prompts]
        chat = message.chat
        continues = chat is None or chat.continue_final_message
        return Admitted(prompts, max_tokens, seeds, sampling, options, continues)

    def chat_ids(self, chat: ChatPrompt, *, limit: int | None = None) -> list[int]:
        """Return the ids of a conversation; TooLong early if they surely exceed *limit*."""
        rendered = self._renderer.render(chat)
        if limit is not None:
            self._check_text(rendered.text, limit, "messages")
            typed = sum(plain for _, plain in rendered.pieces)
            check_prompt(typed, limit, at_least=True, param="messages")
        return self._renderer.encode(rendered, add_special_tokens=chat.add_special_tokens)

    def text_ids(
        self, text: str, *, add_special_tokens: bool, limit: int | None = None
    ) -> list[int]:
        """Return the ids of *text*; TooLong early if they surely exceed *limit*."""
        if limit is not None:
            self._check_text(text, limit, "prompt")
        ids = self._vocabulary.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            self._warn_of_two_bos(ids)
        return ids

    def _prompts(self, message: Generate) -> list[Prompt]:
        keep = self._kept(message.params)
        limit = self._resolved.max_model_len if keep is None else None
        if message.chat is not None:
            ids = self.chat_ids(message.chat, limit=limit)
            prompts = [Prompt(ids, _continued_text(message.chat) if message.echo else "")]
        else:
            prompts = [self._prompt(message, prompt, limit) for prompt in message.prompts]
        if not prompts:
            raise BadRequest("prompt must not be empty", param="prompt")
        if keep is not None:
            prompts = [self._truncated(message, prompt, keep) for prompt in prompts]
        given = message.prompts if message.chat is None else [""]
        for prompt, source in zip(prompts, given, strict=True):
            if isinstance(source, str):  # a tokenizer may have ids that the model has not
                check_ids(_field(message), prompt.token_ids, self._resolved.spec.vocab_size)
        return prompts

    def _prompt(self, message: Generate, prompt: str | list[int], limit: int | None) -> Prompt:
        if isinstance(prompt, str):
            text = prompt
            keep = self._kept(message.params)
            if keep is not None and self._vocabulary.least_tokens(prompt) > keep:
                prompt = self._vocabulary.tail(prompt, keep)
            add = message.add_special_tokens
            ids = self.text_ids(prompt, add_special_tokens=add, limit=limit)
            return Prompt(ids, text)
        ids = list(prompt)
        if limit is not None:
            check_prompt(len(ids), limit, generate=False)
        check_ids("prompt", ids, self._resolved.spec.vocab_size)
        return Prompt(ids, self._shown(message, ids))

    def _truncated(self, message: Generate, prompt: Prompt, keep: int) -> Prompt:
        if len(prompt.token_ids) <= keep:
            return prompt
        ids = prompt.token_ids[-keep:]
        return Prompt(ids, prompt.text if message.chat else self._shown(message, ids))

    def _kept(self, params: SamplingParams) -> int | None:
        """Return how many last tokens of a prompt are kept; None: all, or an error."""
        keep = params.truncate_prompt_tokens
        if keep != -1:
            return keep
        room = self._resolved.max_model_len
        if self.max_sequence_tokens is not None:
            room = min(room, self.max_sequence_tokens)
        return max(room - (1 if params.max_tokens is None else params.max_tokens), 1)

    def _shown(self, message: Generate, ids: list[int]) -> str:
        """Return the text that echo shows for a prompt of which there are only *ids*."""
        if not message.echo or not message.params.detokenize:
            return ""
        skip = message.params.skip_special_tokens
        return self._vocabulary.decode(ids, skip_special_tokens=skip)

    def _output_tokens(self, message: Generate, prompt: Prompt) -> int:
        resolved, params = self._resolved, message.params
        return output_tokens(
            len(prompt.token_ids),
            params.max_tokens,
            max_model_len=resolved.max_model_len,
            max_sequence_tokens=self.max_sequence_tokens,
            min_tokens=params.min_tokens,
            default=None if message.chat is None else resolved.spec.generation.max_new_tokens,
            clamp=resolved.config.server.clamp_max_tokens,
            param=_field(message),
            max_field=message.max_tokens_field,
        )

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.next() if params.seed is None else unsigned_seed(params.seed)

    def _check_text(self, text: str, limit: int, param: str) -> None:
        """Refuse a text that is surely too long before time is spent on encoding it."""
        least = self._vocabulary.least_tokens(text)
        if least > limit:
            raise TooLong(
                f"{param} has at least {least} tokens, {context_length(limit)}", param=param
            )

    def _warn_of_two_bos(self, ids: list[int]) -> None:
        bos = self._vocabulary.bos_id
        if bos is None or self._warned_of_bos or ids[:2] != [bos, bos]:
            return
        self._warned_of_bos = True
        logger.warning(
            "a prompt already begins with the BOS token that is added to it, so it has two; "
            "send add_special_tokens: false with such prompts (told once)"
        )


def _field(message: Generate) -> str:
    return "prompt" if message.chat is None else "messages"


def _options(message: Generate, *, return_token_ids: bool) -> ChoiceOptions:
    params = message.params
    return ChoiceOptions(
        stream=message.stream,
        stops=params.stop_strings(),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        return_token_ids=return_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        echo=message.echo,
        echo_logprobs=message.echo and message.chat is None and params.logprobs is not None,
    )


def _engine_prompt_logprobs(options: ChoiceOptions) -> int | None:
    """Return how many alternatives the engine must report for prompt tokens, None for nothing."""
    wanted = [options.prompt_logprobs, options.logprobs if options.echo_logprobs else None]
    return max((count for count in wanted if count is not None), default=None)


def _continued_text(chat: ChatPrompt) -> str:
    """Return what echo shows of a conversation: the final message, if it is continued."""
    if not chat.continue_final_message or not chat.messages:
        return ""
    content = chat.messages[-1].get("content")
    if isinstance(content, str):
        return content
    texts = [part.get("text") or "" for part in content or () if isinstance(part, dict)]
    return "\n".join(texts)
