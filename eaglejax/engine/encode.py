"""From a prompt, in whichever form, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from checkpoints.chat_template import ChatTemplate
from checkpoints.tokenizer import Tokenizer
from eaglejax.engine.request import Prompt, RequestError


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> list[int]:
    """Token ids of a prompt: text as it is, messages through the chat template, ids checked.

    Raises:
        RequestError: the prompt is empty or malformed, or an id is outside the vocabulary.
    """
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise RequestError(f"prompt: {error}") from error
    elif isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"prompt: expected text, token ids or a list of messages, found {type(prompt).__name__}"
        )
    elif len(prompt) and isinstance(prompt[0], Mapping):
        if template is None:
            raise RequestError("messages: the model has no chat template; give text or ids")
        try:
            text = template.render(list(prompt))  # type: ignore[arg-type]
            ids = tokenizer.encode(text, add_bos=False)
        except ValueError as error:
            raise RequestError(f"messages: {error}") from error
    else:
        ids = cast("list[int]", list(prompt))
    for position, token in enumerate(ids):
        is_id = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not is_id or not 0 <= token < vocab_size:
            raise RequestError(
                f"token_ids[{position}] = {token!r}: expected an id from 0 to {vocab_size - 1}"
            )
    if not ids:
        raise RequestError("prompt is empty: expected at least one token")
    return [int(token) for token in ids]
