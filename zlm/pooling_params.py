"""How one request is pooled: the public value type and its range checks.

Knows nothing of models: whether a model's vectors may be cut is checked by the tokenizer process.
Imports only the error tree.
"""

import msgspec

from zlm.errors import BadRequest, clip

MAX_PROMPT_NAME_CHARACTERS = 256
TASKS = ("embed", "classify", "token_embed", "token_classify")


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be done with texts whose vectors or scores are wanted.

    dimensions: keep so many first elements of the vector (for models made for that).
    normalize: bring the vector to length 1; None: as the model says.
    activation: apply the model's function to logits of labels; None and True: yes.
    truncate_prompt_tokens: keep so many first tokens of each input, -1: as many as the context has.
    prompt_name: which of the model's own prompts precedes each text; None: the default one, if any.
    task: one of TASKS: a vector or labels, of the whole input or (token_...) of each of its tokens;
    None: what the model was made for.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    task: str | None = None

    def check(self) -> None:
        """Raise BadRequest, naming the field and the limit, if a value is out of range."""
        if self.dimensions is not None and not 1 <= self.dimensions < 2**31:
            raise BadRequest(
                f"dimensions must be at least 1, got {self.dimensions}", param="dimensions"
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and not 1 <= keep < 2**31:
            raise BadRequest(
                f"truncate_prompt_tokens must be at least 1, or -1, got {keep}",
                param="truncate_prompt_tokens",
            )
        if self.task is not None and self.task not in TASKS:
            raise BadRequest(
                f"task must be one of {', '.join(TASKS)}, got {clip(self.task)}", param="task"
            )
        if len(self.prompt_name or "") > MAX_PROMPT_NAME_CHARACTERS:
            raise BadRequest(
                f"prompt_name is longer than {MAX_PROMPT_NAME_CHARACTERS} characters",
                param="prompt_name",
            )
