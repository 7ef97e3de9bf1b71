"""Conversations rendered by a model's chat template."""

from __future__ import annotations

from typing import Any

from ..engine.engine import LoadedModel
from ..models.text import ChatPrompt
from .chat_protocol import TemplateFields
from .sampling import option_errors, text_processor


def render(body: TemplateFields, model: LoadedModel, **arguments: Any) -> ChatPrompt:
    """arguments: variables of the template that the body does not name. Raises ApiError 400."""
    generates = body.add_generation_prompt
    with option_errors():
        return text_processor(model).chat(
            [message.model_dump(exclude_none=True) for message in body.messages],
            [tool.model_dump(exclude_none=True) for tool in body.tools],
            add_generation_prompt=not body.continue_final_message if generates is None else generates,
            continue_final_message=body.continue_final_message,
            arguments={**arguments, **body.chat_template_kwargs},
        )
