"""``LLM``: the offline interface, in vLLM's names, over the same engine the server uses.

Owns the shape of calls and answers: keywords to a Config, prompts of every form to ``Generate``
messages, ``Delta`` messages to ``RequestOutput`` values, the progress bar. The processes, sockets
and the tokenizer behind it are ``zlm.offline.OfflineEngine``'s.
"""

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from zlm import offline_pooling
from zlm.config import (
    CacheOptions,
    ComputeOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    check,
)
from zlm.errors import BadRequest, ConfigError, ZlmError
from zlm.messages import (
    ChatPrompt,
    Delta,
    Failed,
    Generate,
    Pool,
    Pooled,
    TokenLogprob,
)
from zlm.metrics import EngineStats
from zlm.offline import Answer, OfflineEngine
from zlm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestOutput,
    ScoringRequestOutput,
)
from zlm.pooling_params import PoolingParams
from zlm.progress import ProgressBar
from zlm.prompts import ChatMessage, Prompt, as_list, conversation, conversations, prompt_parts
from zlm.sampling_params import SamplingParams

T = TypeVar("T")


class LLM:
    """A model in child processes of its own, driven from this process.

    The keywords have vLLM's names and meaning; errors name the server's flag of the same name.
    ``swap_space``, ``disable_log_stats`` and ``trust_remote_code`` are taken and change nothing:
    preempted sequences are recomputed, and no code from a checkpoint is ever run. Without ``seed``
    every process draws fresh randomness. With ``skip_tokenizer_init`` prompts are token ids, and
    so are outputs.

    Usable from any thread (calls take turns), several at once in a process, and as a context
    manager. ``shutdown``, the end of the ``with`` block, garbage collection or the end of the
    interpreter, whichever comes first, ends the children.

    Raises ConfigError for keywords that contradict each other, ModelError for a checkpoint that
    cannot be run, and Internal when a child dies while starting.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        task: str = "auto",
        runner: str = "auto",
        convert: str = "auto",
        revision: str | None = None,
        download_dir: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        load_format: str = "auto",
        generation_config: str = "auto",
        chat_template: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        block_size: int = 16,
        gpu_memory_utilization: float = 0.90,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        cpu_threads: int | None = None,
        enforce_eager: bool = False,
        deterministic: bool = False,
        attention_backend: Literal["auto", "triton", "sdpa"] = "auto",
        swap_space: float = 0,
        trust_remote_code: bool = False,
        disable_log_stats: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            _refuse_keyword(next(iter(unknown)))
        config = Config(
            model=ModelOptions(
                model=str(model),
                tokenizer=None if tokenizer is None else str(tokenizer),
                skip_tokenizer_init=skip_tokenizer_init,
                task=task,
                runner=runner,
                convert=convert,
                revision=revision,
                download_dir=None if download_dir is None else str(download_dir),
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_len,
                load_format=load_format,
                generation_config=generation_config,
                chat_template=chat_template,
                seed=seed,
                quantization=quantization,
            ),
            cache=CacheOptions(
                block_size_tokens=block_size,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                num_blocks_override=num_gpu_blocks_override,
                enable_prefix_caching=enable_prefix_caching,
            ),
            scheduler=SchedulerOptions(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
                policy=scheduling_policy,
            ),
            parallel=ParallelOptions(
                device=device,
                tensor_parallel_size=tensor_parallel_size,
                cpu_threads=cpu_threads,
            ),
            compute=ComputeOptions(
                enforce_eager=enforce_eager,
                deterministic=deterministic,
                attention_backend=attention_backend,
            ),
        )
        self._engine = OfflineEngine(_typed(config))
        self._lock = threading.Lock()
        self._next_id = 0
        self._finalizer = weakref.finalize(self, self._engine.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs stand in the order of the prompts.

        A prompt is a text, a list of ids, or a dict with ``prompt`` or ``prompt_token_ids`` (and
        ``cache_salt``). ``sampling_params`` is one for all, or one for each; None takes the model's
        defaults. ``priority`` (lower runs earlier) counts under ``scheduling_policy="priority"``.

        Raises BadRequest or TooLong, naming the prompt's index, before anything runs; Internal
        when the engine has died. KeyboardInterrupt ends what runs and leaves the engine usable.
        """
        forms = [prompt_parts(i, p) for i, p in enumerate(as_list(prompts))]
        requests = [
            {"prompts": [ids if ids is not None else text or ""], "cache_salt": salt}
            for text, ids, salt in forms
        ]
        texts = [text for text, _, _ in forms]
        return self._run(requests, texts, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists).

        The prompt is what the model's chat template makes of it, or ``chat_template`` (the
        template itself). With ``continue_final_message`` the last message is continued instead
        of answered (then ``add_generation_prompt`` must be False). The rest is as in ``generate``.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message needs add_generation_prompt=False",
                param="continue_final_message",
            )
        requests = [
            {
                "prompts": [],
                "chat": ChatPrompt(
                    messages=conversation(i, each),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    template_kwargs=chat_template_kwargs,
                ),
            }
            for i, each in enumerate(conversations(messages))
        ]
        return self._run(requests, [None] * len(requests), sampling_params, use_tqdm, priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of every prompt; the outputs stand in the order of the prompts.

        Raises BadRequest, naming the prompt's index, for what cannot be done, and for a model that
        gives no vectors (``runner="pooling"`` makes an embedding model of a model of text).
        """
        offline_pooling.check_vectors(self._engine.resolved)
        params = offline_pooling.params_of(pooling_params, truncate_prompt_tokens, task="embed")
        commands = offline_pooling.commands(self._forms(prompts), params)
        return [offline_pooling.embedding(p) for p in self._pool(commands, use_tqdm)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled vector of every prompt, of length 1 only if the parameters say so.

        pooling_task: as ``PoolingParams.task``; with token_embed there is a vector for each token.
        """
        params = offline_pooling.params_of(
            pooling_params, truncate_prompt_tokens, raw=True, task=pooling_task
        )
        commands = offline_pooling.commands(self._forms(prompts), params)
        return [offline_pooling.raw(p) for p in self._pool(commands, use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels for every prompt, in order."""
        labels = offline_pooling.labels(self._engine.resolved)
        params = offline_pooling.params_of(pooling_params, truncate_prompt_tokens, task="classify")
        commands = offline_pooling.commands(self._forms(prompts), params)
        return [offline_pooling.classes(p, labels) for p in self._pool(commands, use_tqdm)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """Score one text against each of several, or as many against as many.

        A cross-encoder reads both texts at once; of any other embedding model the score is the
        cosine of the two vectors.
        """
        params = offline_pooling.params_of(pooling_params, truncate_prompt_tokens)
        pairs = offline_pooling.Pairing(data_1, data_2, self._engine.resolved)
        return pairs.outputs(self._pool(pairs.commands(params), use_tqdm))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults (its generation_config.json), for the caller to change."""
        defaults = self._engine.resolved.spec.generation
        return SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            max_tokens=defaults.max_new_tokens or 16,
        )

    def stats(self) -> EngineStats:
        """Return the engine's report: counters since it started, and gauges."""
        with self._lock:
            return self._engine.stats()

    def shutdown(self) -> None:
        """End the child processes. Calling it again does nothing; generate raises afterwards."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _forms(self, prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
        """Return prompts of any form as texts or ids."""
        forms = [prompt_parts(i, p) for i, p in enumerate(as_list(prompts))]
        return [ids if ids is not None else text or "" for text, ids, _ in forms]

    def _pool(self, commands: list[Pool], use_tqdm: bool | Callable[..., Any]) -> list[Pooled]:
        """Send *commands*, each under an id and time of its own; return their answers."""
        with self._lock:
            now, first = time.monotonic(), self._next_id
            self._next_id += len(commands)
            requests = [
                msgspec.structs.replace(command, request_id=first + i, arrival=now)
                for i, command in enumerate(commands)
            ]
            with ProgressBar(len(requests), use_tqdm) as bar:
                answers = self._engine.run(requests, bar.advance)
        return offline_pooling.all_pooled(answers)

    def _run(
        self,
        requests: list[dict[str, Any]],
        texts: list[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        count = len(requests)
        every = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if isinstance(every, SamplingParams):
            params = [_checked(every, "sampling_params")] * count
        else:
            each = _one_each("sampling_params", every, count)
            params = [_checked(p, f"sampling_params[{i}]") for i, p in enumerate(each)]
        priorities = priority if priority is not None else 0
        if isinstance(priorities, int):
            priorities = [priorities] * count
        priorities = _one_each("priority", priorities, count)
        with self._lock:
            now = time.monotonic()
            generates = [
                Generate(
                    request_id=self._next_id + i,
                    arrival=now,
                    params=params[i],
                    return_token_ids=True,
                    priority=priorities[i],
                    **request,
                )
                for i, request in enumerate(requests)
            ]
            self._next_id += count
            with ProgressBar(count, use_tqdm) as bar:
                answers = self._engine.run(generates, bar.advance)
            return [
                _output(generate, text, answer, self._engine)
                for generate, text, answer in zip(generates, texts, answers, strict=True)
            ]


def _refuse_keyword(name: str) -> NoReturn:
    known = [p for p in inspect.signature(LLM.__init__).parameters if p not in ("self", "unknown")]
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{hint}")


def _typed(config: Config) -> Config:
    """Return *config* with every value of its declared type and range, or raise ConfigError."""
    try:
        typed = msgspec.convert(msgspec.to_builtins(config), Config)
    except (TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"LLM(): {error}") from error
    check(typed)
    return typed


def _checked(params: SamplingParams, where: str) -> SamplingParams:
    """Return a checked copy of *params*; raise BadRequest, saying *where*, if it is wrong."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where} must be SamplingParams, not {type(params).__name__}")
    try:
        copy = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
        copy.check()
    except (TypeError, msgspec.ValidationError) as error:
        raise BadRequest(f"{where}: {error}", param="sampling_params") from error
    except ZlmError as error:
        raise BadRequest(f"{where}: {error.message}", param=error.param) from error
    return copy


def _one_each(name: str, values: Sequence[T], count: int) -> Sequence[T]:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values


def _output(
    generate: Generate, text: str | None, answer: Answer, engine: OfflineEngine
) -> RequestOutput:
    """Build what the caller gets from what the tokenizer core said of one request."""
    ids: list[int] = next((p for p in generate.prompts if isinstance(p, list)), [])
    output = RequestOutput(
        request_id=str(generate.request_id), prompt=text, prompt_token_ids=ids, outputs=[]
    )
    if isinstance(answer, Failed):
        output.error = answer.message
        output.outputs = [
            CompletionOutput(index=i, text="", token_ids=[], finish_reason="error")
            for i in range(generate.params.n)
        ]
        return output
    assert isinstance(answer, list), "text was asked for"
    first = answer[0]
    output.prompt_token_ids = first.prompt_token_ids or []
    output.num_cached_tokens = first.num_cached_tokens
    output.outputs = [_completion(delta) for delta in answer]
    if first.prompt_logprobs is not None:
        output.prompt_logprobs = [_position(entry) for entry in first.prompt_logprobs]
    if generate.chat is not None:
        output.prompt = engine.detokenize(output.prompt_token_ids)
    return output


def _completion(delta: Delta) -> CompletionOutput:
    completion = CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids or [],
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
    if delta.logprobs is not None:
        completion.logprobs = [_position(entry) or {} for entry in delta.logprobs]
        completion.cumulative_logprob = sum(entry.logprob or 0.0 for entry in delta.logprobs)
    return completion


def _position(entry: TokenLogprob) -> PositionLogprobs | None:
    """Return the candidates of one position by id: the token that stands there comes first."""
    if entry.logprob is None:
        return None
    chosen = Logprob(entry.logprob, entry.rank or None, entry.token)
    candidates = {entry.token_id: chosen}
    for rank, (token_id, token, _, logprob) in enumerate(entry.top, 1):
        candidates.setdefault(token_id, Logprob(logprob, rank, token))
    return candidates
