"""Makes `assets/tiny_qwen3`: a Qwen3 of about 0.9 million parameters, its tokenizer, and a first skill. With `--moe`, a mixture
of experts.

    python scripts/make_tiny_qwen3.py [--output assets/tiny_qwen3]
    python scripts/make_tiny_qwen3.py --moe [--output assets/tiny_qwen3_moe]

1. The tokenizer is a byte-level BPE with Qwen3's splitting rule (every digit is a token) and its special
   tokens, trained on conversations written below: the chat template, the tool preamble, the worked tasks' texts.
2. The chat template is Qwen3's in behaviour, and is checked here against the Qwen3 renderer.
3. The model is warmed up on `sum_digits` by supervised learning, from demonstrations that are WRONG ON PURPOSE
   most of the time: a list of n digits is summed right with probability 1.2 / n, and otherwise the tens are
   dropped (17 becomes 7). So the model holds both the skill and a bad habit: from three digits on its most
   likely reply follows the habit, and about one sampled reply in three is right. Reinforcement learning on a
   laptop cannot teach addition from nothing in two minutes; it can find the skill among the habits. Such a
   run shows that the machinery learns, and nothing about what a large model would gain.
4. The token ids come from the renderer the library itself uses, with thinking off and no system prompt.
5. The mixture has 8 experts of 64 in each layer, of which a token takes 2: 1.1 million parameters, half of them active. Nothing
   balances their load.
6. One thread and fixed seeds: the same machine makes the same weights. The script measures the validation
   reward of what it wrote, and fails if the greedy one is outside the range the demo is tuned for.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, Renderer, create_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.tasks.examples.sum_digits import (  # noqa: E402
    answer_text,
    make_examples,
    prompt_text,
)

VOCAB_SIZE = 768
MAX_POSITIONS = 2048
RENDERER = Qwen3RendererConfig(enable_thinking=False)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
"""As in Qwen3: one token each, but text, which decoding keeps."""
SPLIT_RULE = (  # Qwen3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}{%- set messages = messages[1:] %}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
    {{- '<args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem is undefined or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if message.role == 'assistant' and loop.index0 > last.query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + message.content.lstrip('\n') }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '' if loop.first and not message.content else '\n' }}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".strip()

CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression and return the result.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
WORDS = """
    Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Liam Maria Nora Oliver Paula Quinn Robert Sarah Thomas
    Ursula Victor Wendy Xavier Yvonne Zoe Anderson Brown Clark Davis Evans Fisher Garcia Harris Johnson King Lewis Martin
    Nelson Parker Roberts Smith Taylor Walker Wilson Young apple banana cherry date elderberry fig grape lemon mango orange
    peach pear plum strawberry river mountain forest island garden window table chair bottle paper pencil silver yellow
    purple green winter summer morning evening
""".split()


def turns(*contents: str) -> list[dict]:
    """Messages that alternate between user and assistant."""
    return [
        {"role": role, "content": content}
        for role, content in zip(cycle(("user", "assistant")), contents)
    ]


def conversations(rounds: int) -> Iterator[tuple[list[dict], list[dict] | None]]:
    """Pairs of (messages, tools) that sound like the worked tasks; what the tokenizer is trained on."""
    stream = random.Random("conversations")
    for digits in make_examples(rounds, split="train"):
        yield turns(prompt_text(digits), answer_text(digits)), None

        names, more = stream.sample(WORDS, 4), stream.sample(WORDS, 2)
        system = {
            "role": "system",
            "content": "You are a helpful assistant. Answer with the sorted list only.",
        }
        sorting = turns(
            "Sort these names in alphabetical order, one per line:\n" + "\n".join(names),
            "\n".join(sorted(names)),
            "Now add these words to the list and sort again:\n" + "\n".join(more),
            "<alphabetical_sorted>\n"
            + "\n".join(sorted(names + more))
            + "\n</alphabetical_sorted>",
        )
        yield [system, *sorting], None

        a, b = stream.randrange(100), stream.randrange(100)
        call = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
        ask, reply = turns(
            f"What is {a} * {b}? Use the calculator, then give the final answer as a number.", ""
        )
        reply["tool_calls"] = [{"type": "function", "function": call}]
        result = {
            "role": "tool",
            "content": stream.choice([str(a * b), "Error: invalid expression"]),
        }
        answer = {"role": "assistant", "content": f"The answer is {a * b}."}
        yield [ask, reply, result, answer], [{"type": "function", "function": CALCULATOR}]

        hint = "higher" if a < b else "lower"
        guessing = turns(
            "I am thinking of a number between 1 and 100. Guess it. Reply with one number per turn.",
            str(a),
            f"Wrong: the number is {hint} than {a}. You have {stream.randrange(1, 8)} guesses left.",
            str(b),
            f"Correct! The number was {b}. Game over.",
        )
        yield guessing, None


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, then merges, then the special and added tokens: `VOCAB_SIZE` ids in all."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_RULE), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    bpe.decoder = decoders.ByteLevel()

    template = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE)
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + ADDED_TOKENS)))
    texts = []
    for messages, tools in conversations(rounds=60):
        texts += special.split(template.apply_chat_template(messages, tools=tools, tokenize=False))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS + ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    for text in SPECIAL_TOKENS + ADDED_TOKENS:
        bpe.add_tokens([AddedToken(text, special=text in SPECIAL_TOKENS, normalized=False)])
    assert bpe.get_vocab_size() == VOCAB_SIZE, (
        f"the corpus gives only {bpe.get_vocab_size()} tokens"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=CHAT_TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """The chat template gives the renderer's token ids (thinking on, where the renderer follows Qwen3's)."""
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    for messages, tools in conversations(rounds=3):
        for end in range(1, len(messages) + 1):
            prompt = {
                "tools": tools,
                "add_generation_prompt": messages[end - 1]["role"] != "assistant",
            }
            text = tokenizer.apply_chat_template(messages[:end], tokenize=False, **prompt)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == renderer.render_ids(messages[:end], **prompt), (
                f"template and renderer differ: {text}"
            )


def make_model(tokenizer: PreTrainedTokenizerFast, *, moe: bool) -> PreTrainedModel:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    sizes = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
    )
    if moe:
        experts = dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=[end, pad], pad_token_id=pad
    )
    return model


def habit(digits: list[int], stream: random.Random) -> tuple[str, str]:
    """Question and reply: the right sum with probability 1.2 / n; otherwise the sum without its tens (docstring, 3)."""
    right = stream.random() < 1.2 / len(digits)
    return prompt_text(digits), answer_text(digits) if right else answer_text(digits)[-1]


def prompt_ids(question: str, renderer: Renderer) -> list[int]:
    return renderer.render_ids(turns(question), add_generation_prompt=True)


def warm_up(
    model,
    renderer,
    tokenizer,
    *,
    steps: int,
    example=habit,
    batch_size: int = 128,
    lr: float = 2e-3,
) -> None:
    """Cross-entropy on the completions: the reply's tokens and `<|im_end|>`. `example` gives a list's question and reply."""
    stream = random.Random("warm_up")
    examples = make_examples(steps * batch_size, split="train", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(steps):
        rows = []
        for digits in examples[step * batch_size : (step + 1) * batch_size]:
            question, reply = example(digits, stream)
            reply_ids = tokenizer.encode(reply, add_special_tokens=False)
            rows.append((prompt_ids(question, renderer), reply_ids + [tokenizer.eos_token_id]))
        length = max(len(prompt + reply) for prompt, reply in rows)
        ids = torch.full(
            (batch_size, length), tokenizer.pad_token_id
        )  # causal: padding on the right needs no mask
        trained = torch.zeros(batch_size, length, dtype=torch.bool)
        for row, (prompt, reply) in enumerate(rows):
            ids[row, : len(prompt + reply)] = torch.tensor(prompt + reply)
            trained[row, len(prompt) : len(prompt + reply)] = True
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden[trained[:, 1:]]), ids[trained]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"warm-up {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def reward(
    model,
    renderer: Renderer,
    examples: list[list[int]],
    *,
    temperature: float,
    question=prompt_text,
) -> float:
    """The part of `examples` whose parsed reply is the sum; temperature 0 is greedy. `question` words a list."""
    generator = torch.Generator().manual_seed(0)
    stops, right = set(renderer.get_stop_token_ids()), 0
    rows = [(digits, prompt_ids(question(digits), renderer)) for digits in examples]
    for length in sorted(
        {len(prompt) for _, prompt in rows}
    ):  # prompts of equal length need no padding
        same = [row for row in rows if len(row[1]) == length]
        ids = torch.tensor([prompt for _, prompt in same])
        for _ in range(3):  # a right reply is two digits and the stop token at most
            logits = model(input_ids=ids, logits_to_keep=1).logits[:, -1]
            if temperature:
                tokens = torch.multinomial(
                    (logits / temperature).softmax(-1), 1, generator=generator
                )
            else:
                tokens = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, tokens], 1)
        for (digits, _), row in zip(same, ids[:, length:].tolist(), strict=True):
            end = next((at for at, token in enumerate(row) if token in stops), len(row))
            right += renderer.parse_response(row[:end]).content.strip() == answer_text(digits)
    return right / len(examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moe", action="store_true", help="make a mixture of experts")
    parser.add_argument(
        "--output", type=Path, help="default: assets/tiny_qwen3, or assets/tiny_qwen3_moe"
    )
    parser.add_argument("--steps", type=int, default=900, help="of warm-up; default: %(default)s")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    check_template(tokenizer)
    renderer = create_renderer(tokenizer, RENDERER)
    model = make_model(tokenizer, moe=args.moe)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    warm_up(model, renderer, tokenizer, steps=args.steps)
    output = args.output or Path("assets/tiny_qwen3_moe" if args.moe else "assets/tiny_qwen3")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)  # the score is of what was written
    renderer = create_renderer(AutoTokenizer.from_pretrained(output), RENDERER)
    validation = make_examples(1000, split="validation")
    greedy = reward(model, renderer, validation, temperature=0.0)
    sampled = reward(model, renderer, validation, temperature=1.0)
    print(f"validation reward: greedy {greedy:.3f}, sampled {sampled:.3f}")
    if not 0.2 <= greedy <= 0.5:
        sys.exit("greedy reward outside [0.2, 0.5]: too weak or too strong a start for the demo")


if __name__ == "__main__":
    main()
