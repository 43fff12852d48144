"""Chat templates that a config gives instead of the tokenizer's own, as for a base model."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from torchtitan.experiments.rl.errors import ConfigError, MissingError

PLAIN = "plain"
"""Name of the template for a base model, which knows no roles: question and answer as text."""
PLAIN_STOP = "\nQuestion:"
"""Text at which an answer by the plain template ends: the model begins a question of its own."""
_PLAIN_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ " " + (message.content | trim) + "\n" }}
{%- elif message.role == "system" %}{{ message.content + "\n" }}
{%- elif message.role == "tool" %}{{ "Result: " + message.content + "\nAnswer:" }}
{%- else %}{{ "Question: " + message.content + "\nAnswer:" }}
{%- endif %}
{%- endfor %}"""
_HELLO = {"role": "user", "content": "Hello"}
_FIELD = "renderer.template"


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Have a tokenizer render conversations by another chat template than its own.

    Args:
        tokenizer: the tokenizer, which is changed.
        template: "plain", or the path of a Jinja file.

    Raises:
        ConfigError: The file can't be read, or renders no message.
    """
    if template == PLAIN:
        # Some models are at a loss without the token that began every text they were trained on.
        begins = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + _PLAIN_TEMPLATE
        return
    try:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    except FileNotFoundError:
        cure = f'no such file; name a Jinja file, or "{PLAIN}"'
        raise MissingError(_FIELD, template, cure) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_FIELD, template, f"can't be read: {error}") from error
    try:
        text = tokenizer.apply_chat_template([_HELLO], tokenize=False)
    except Exception as error:  # Jinja's, or what the template raises itself
        cure = f"renders no message: {' '.join(str(error).split())}"
        raise ConfigError(_FIELD, template, cure) from error
    if not text:
        raise ConfigError(_FIELD, template, "renders no text of a message")
