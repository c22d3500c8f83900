"""What the scheduler is held to, and what is refused because it can never fit in that."""

from dataclasses import dataclass

from zlm.errors import BadRequest, TooLong, ZlmError
from zlm.messages import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits and choices of the scheduler. Counts are tokens unless the comment says otherwise."""

    max_model_len: int
    max_num_seqs: int  # sequences that have a slot
    max_num_batched_tokens: int  # budget of a step; at least max_num_seqs
    vocab_size: int
    eos_ids: tuple[int, ...]
    chunked_prefill: bool = True
    by_priority: bool = False  # order by Submit.priority before arrival
    prefix_caching: bool = True
    stages: int = 1  # workers that compute different layers: as many steps are in flight
    verify: bool = False  # compare every prefix hit, token by token, with what was cached


def refusal(submit: Submit, max_model_len: int, max_sequence_tokens: int) -> ZlmError | None:
    """Return why *submit* can never run, or None.

    *max_sequence_tokens* is the longest sequence that the KV cache can hold.
    """
    prompt = len(submit.token_ids) // 4
    total = prompt + submit.max_tokens
    if prompt == 0:
        return BadRequest("the prompt has no tokens", param="prompt")
    if submit.n < 1:
        return BadRequest(f"n must be at least 1, got {submit.n}", param="n")
    asked = f"{prompt} prompt tokens and max_tokens {submit.max_tokens} make {total} tokens"
    if total > max_model_len:
        return TooLong(f"{asked}, this model's maximum context length is {max_model_len}")
    if total > max_sequence_tokens:
        return TooLong(
            f"{asked}, the KV cache of this server holds at most {max_sequence_tokens} of one "
            f"sequence (its context length is {max_model_len})"
        )
    return None
