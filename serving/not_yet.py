"""Fields of OpenAI, vLLM and SGLang requests that are not supported yet.

Each with the value that asks for what happens anyway (None where there is no such value): clients
write such values out, and they are harmless. Any other value is refused by the field's name.
"""

from __future__ import annotations

from typing import Any

REQUEST_FIELDS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "top_logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "regex": None,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": None,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "reasoning_effort": None,
    "verbosity": None,
    "web_search_options": None,
    "service_tier": None,
    "store": False,
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "min_tokens": 0,
    "bad_words": [],
    "allowed_token_ids": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": None,
    "truncate_prompt_tokens": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": None,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": [],
    "priority": 0,
}
MESSAGE_FIELDS: dict[str, Any] = {
    "name": None,
    "tool_calls": [],
    "tool_call_id": None,
    "function_call": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
}
NAMES = frozenset(REQUEST_FIELDS) | frozenset(MESSAGE_FIELDS)
