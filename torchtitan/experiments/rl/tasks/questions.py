"""Questions of your own, or an env of your own: rows of data, reward functions, and no Task and no Config to write.

def exact(completion, example):
    return completion.strip() == example["answer"]

task = question_task("mine.jsonl", exact)  # rows such as {"question": "6 * 7?", "answer": "42"}

class AddEnv(MessageEnv):
    async def reset(self): return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])
    async def step_message(self, message): return StepOutput(env_messages=[], done=True)

task = env_task("mine.jsonl", AddEnv, exact)
"""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from renderers import Message

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import Cure, NonEmptyStr
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.rows import RowDataset, Rows, is_missing, row_datasets
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.demonstrations import conversation_of
from torchtitan.experiments.rl.tasks.task import Task

_BRACES = re.compile(r"\{([^{}]+)\}")
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\s*\w[\w .-]*")
"""Text between braces that looks like the name of a column."""
_COMMAND = re.compile(r"(?:\\[A-Za-z]+\*?(?:\{[^{}]*\}|\[[^\[\]]*\])*|[\^_])$")
"""End of a text behind which braces are LaTeX's."""

ANSWER_COLUMN = "answer"
"""Column that the preflight tries as the reply."""

TEMPLATE_TOKENS = 256
"""What a chat template adds to a question, at most. Prompts that are clearly shorter than a rollout are not rendered here."""


class QuestionEnv(MessageEnv):
    """Asks a question, or goes on with a conversation, after a system prompt where there is one. An answer ends it."""

    def __init__(self, question: str | Sequence[Message], *, system_prompt: str | None = None):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        self.messages: list[Any] = [*system, *asked]

    async def reset(self) -> ResetOutput:
        return ResetOutput(
            messages=self.messages, control_tokens=True
        )  # the task has checked its rows

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)


class QuestionTask(Task):
    """One question, one answer: each row of the dataset fills the template, and whatever the model answers is scored."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        template: str = "{question}"
        """The user's message; {name} stands for the row's column of that name."""
        messages_column: NonEmptyStr | None = None
        """Where the rows are chats: the column of the messages that the model answers, in place of the template."""
        missing_text: str | None = None
        """Text that the template has in place of a missing value, such as "" for Alpaca's ``input``. None: a row that lacks one
        is refused."""
        system_prompt: str | None = None
        control_tokens: bool = False
        """True if special tokens in the text of a row, such as "<|im_end|>", are meant as control tokens of the prompt.
        Renderers can't write them as text, so a row that has one is refused otherwise. Those of the template and of the
        system prompt always are control tokens."""
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(QuestionTask.Config, self).validate(field=field, policy_path=policy_path)
            if self.messages_column is None and not _BRACES.search(self.template):
                raise ConfigError(
                    f"{field}.template",
                    self.template,
                    "names no column of the data, such as {question}",
                )

        def check_present(self, *, field: str) -> None:
            super(QuestionTask.Config, self).check_present(field=field)
            if type(self.rubric) is Rubric.Config and not self.rubric.reward_fns:
                option = f"--{field.replace('_', '-')}.rubric my_rewards.py:exact"
                raise MissingError(
                    f"{field}.rubric", None, f"names no reward function: give one, such as {option}"
                )

    config: Config

    def __init__(self, config: Config, *, name: str, context: BuildContext):
        super().__init__(config, name=name, context=context)
        chats = config.messages_column
        self._columns: list[str] = []
        of, value = ("template", config.template) if chats is None else ("messages_column", chats)
        for dataset in (self.dataset, self.validation):
            if isinstance(dataset, RowDataset):
                columns = {column for row in dataset.rows for column in row}
                self._columns = placeholders(config.template, columns) if chats is None else [chats]
                may_lack = chats is None and config.missing_text is not None
                for column in self._columns:
                    _check_column(
                        dataset, column, f"{name}.{of}", value, task=name, may_lack=may_lack
                    )
                if not self._columns:
                    raise ConfigError(
                        f"{name}.{of}", value, "names no column of the data, such as {question}"
                    )

    def make_env(self, sample: DataSample) -> MessageEnv:
        return QuestionEnv(self.asked(sample.env_input), system_prompt=self.config.system_prompt)

    def check_examples(self, *, field: str) -> None:
        """See Task. Refuses chats that end with an answer, and counts rows from which the model can learn nothing."""
        warnings = [
            f"{field}.{part}: of {len(dataset):,} rows {found}"
            for part, dataset in (("dataset", self.dataset), ("validation", self.validation))
            if isinstance(dataset, RowDataset)
            and (found := self._odd_rows(dataset.rows, field=field))
        ]
        self.examples_warning = "; ".join(warnings) or None

    def check_control_tokens(self, tokens: Collection[str], *, field: str) -> None:
        """See Task. Reads the columns of which prompts are made."""
        if self.config.control_tokens or not tokens:
            return
        pattern = re.compile("|".join(map(re.escape, sorted(tokens))))
        for part, dataset in (("dataset", self.dataset), ("validation", self.validation)):
            if not isinstance(dataset, RowDataset):
                continue
            for column in (*self._columns, dataset.config.demonstration_column):
                texts = (pattern.search(str(row.get(column))) for row in dataset.rows)
                found = {index: seen[0] for index, seen in enumerate(texts) if seen is not None}
                if found:
                    index, token = next(iter(found.items()))
                    others = f" ({len(found) - 1:,} others have one too)" if len(found) > 1 else ""
                    cure = (
                        f"{dataset.rows.place(index)} has it in {column!r}, where it would be a control token and could end "
                        f"the message{others}: change the text, or set {field}.control_tokens = True if that is meant"
                    )
                    raise ConfigError(f"{field}.{part}", token, cure)

    def known_answer(self, sample: DataSample) -> str | None:
        """Return the row's ``answer`` as text; None where the row has none."""
        answer = sample.env_input.get(ANSWER_COLUMN) if isinstance(sample.env_input, dict) else None
        return None if is_missing(answer) or isinstance(answer, bytes) else str(answer)

    def asked(self, row: dict[str, Any]) -> str | list[Message]:
        """What an example asks the model."""
        column = self.config.messages_column
        if column is not None:
            return conversation_of(row, messages=column, tools="")[0]
        if self.config.missing_text is not None:
            row = {
                name: self.config.missing_text if value is None else value
                for name, value in row.items()
            }
        return fill(self.config.template, row)

    def _odd_rows(self, rows: Rows, *, field: str) -> str:
        """How many rows are odd, and the first of each kind."""
        found: dict[str, list[int]] = {}
        seen: set[int] = set()
        often = {
            column
            for column in rows[0]
            if sum(row.get(column) is None for row in rows) < len(rows) / 2
        }
        for index, row in enumerate(rows):
            if (key := hash(repr(row))) in seen:
                found.setdefault("repeat another", []).append(index)
            seen.add(key)
            for column in often.difference(self._columns):
                if row.get(column) is None:
                    found.setdefault(f"have no {column!r}", []).append(index)
            for column in self._columns if self.config.messages_column is None else ():
                if isinstance(row[column], list | dict):
                    found.setdefault(
                        f"have a {type(row[column]).__name__} as {column!r}, not a text", []
                    ).append(index)
                elif row[column] is not None and not str(row[column]).strip():
                    found.setdefault(f"have an empty {column!r}", []).append(index)
            if not self._has_room(row, place=rows.place(index), field=field):
                limit = self.config.env.max_rollout_tokens
                found.setdefault(
                    f"leave no room for an answer in env.max_rollout_tokens = {limit}", []
                ).append(index)
        found |= _mixed_types(rows)
        return ", ".join(
            f"{len(odd):,} {what} (first: {rows.place(odd[0])})" for what, odd in found.items()
        )

    def _has_room(self, row: dict[str, Any], *, place: str, field: str) -> bool:
        """Whether the prompt is shorter than a rollout may be."""
        column = self.config.messages_column
        try:
            asked = self.asked(row)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{field}.messages_column", column, f"{place}: {error}") from None
        if not isinstance(asked, str) and asked[-1]["role"] == "assistant":
            cure = "the model answers a user's or a tool's message: leave the answer out, or put it into a column of its own"
            raise ConfigError(
                f"{field}.messages_column",
                column,
                f"{place} ends with an assistant's message; {cure}",
            )
        limit = self.config.env.max_rollout_tokens
        if (
            2 * len(repr(asked).encode()) + TEMPLATE_TOKENS < limit
        ):  # no token is shorter than a byte
            return True
        messages = QuestionEnv(asked, system_prompt=self.config.system_prompt).messages
        return len(self.renderer.render(messages, add_generation_prompt=True).token_ids) < limit


def question_task(
    data: Any, *reward_fns: Callable[..., Any] | RewardFn, **fields: Any
) -> QuestionTask.Config:
    """The config of a QuestionTask; ``row_task`` says what the data may be.

    Args:
        reward_fns: functions ``fn(completion, example)`` where the example is the row's dict, or RewardFn.
        fields: ``validation`` and ``split`` of ``row_task``, and those of QuestionTask.Config, such as ``template``.

    Raises:
        ConfigError: the data is none of these.
    """
    return row_task(QuestionTask.Config, data, *reward_fns, **fields)


C = TypeVar("C", bound=Task.Config)


def row_task(
    config: type[C],
    data: Any,
    *reward_fns: Callable[..., Any] | RewardFn,
    validation: Any = None,
    split: float | None = None,
    **fields: Any,
) -> C:
    """A task's config, of rows and reward functions.

    Args:
        data: a .jsonl, .json, .csv, .tsv or .parquet file (text also as .gz), several by a pattern such as "shards/*.jsonl",
            a folder of ``save_to_disk``, a dataset of the hub, a list of dicts, a table (pandas, polars, pyarrow,
            ``datasets.Dataset``), or a dataset's config.
        validation: as ``data``: rows the policy is measured on and never trained on.
        split: share of ``data`` that is trained on, such as 0.9; the rest is the validation where there is no other.
        fields: of the config, such as ``group_size``.

    Raises:
        ConfigError: the data is none of these.
    """
    if reward_fns:
        fields["rubric"] = Rubric.Config(reward_fns=list(reward_fns))
    dataset, held_out = row_datasets(data, validation, split)
    return config(dataset=dataset, validation=held_out, **fields)


def fill(template: str, row: dict[str, Any]) -> str:
    """Return ``template`` with each {column} replaced by the row's value. Other braces stay.

    Raises:
        KeyError: a word between braces is no column of the row.
    """

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        return str(row[name]) if name in row or _WORD.fullmatch(name) else found[0]

    return _BRACES.sub(filled, template)


def placeholders(template: str, columns: Collection[str]) -> list[str]:
    """Return the names between braces that are columns, or look like one: "q-2", and "the question", but not ``^{n - 1}``."""
    return [
        found[1]
        for found in _BRACES.finditer(template)
        if found[1] in columns
        or _WORD.fullmatch(found[1])
        or (_NAME.fullmatch(found[1]) and not _COMMAND.search(template[: found.start()]))
    ]


def _mixed_types(rows: Rows) -> dict[str, list[int]]:
    """Return the rows whose value is a text where most of the column are numbers, or the other way round."""
    mixed: dict[str, list[int]] = {}
    for column in dict.fromkeys(column for row in rows for column in row):
        texts = [index for index, row in enumerate(rows) if isinstance(row.get(column), str)]
        numbers = [
            index for index, row in enumerate(rows) if isinstance(row.get(column), int | float)
        ]
        if texts and numbers:
            fewer, kinds = (
                (texts, ("text", "number"))
                if len(texts) < len(numbers)
                else (numbers, ("number", "text"))
            )
            mixed[
                f"have a {kinds[0]} as {column!r} where the others have a {kinds[1]}, which are never equal"
            ] = fewer
    return mixed


def _check_column(
    dataset: RowDataset, column: str, field: str, value: str, *, task: str, may_lack: bool
) -> None:
    """Refuse rows that lack what the prompt is made of, as ``field`` says with its ``value``.

    Args:
        may_lack: a text stands in for a missing value.
    """
    columns = {name: None for row in dataset.rows for name in row}
    if column not in columns:
        raise ConfigError(
            field, value, f"the data has no column {column!r}; it has {', '.join(columns)}"
        )
    lacking = [index for index, row in enumerate(dataset.rows) if row.get(column) is None]
    if lacking and not may_lack:
        others = f", and {len(lacking) - 1:,} others" if len(lacking) > 1 else ""
        place = f"{dataset.config.path or 'rows'}: {dataset.rows.place(lacking[0])}"
        cure = "fill it in, or remove the row"
        if field.endswith(".template"):
            cure = f"{cure}, or set {task}.missing_text = '' to ask an empty text there"
        raise ConfigError(field, value, f"{place} has no {column!r}{others}: {cure}")
    for index, row in enumerate(dataset.rows):
        if isinstance(row[column], bytes | bytearray | memoryview):
            place = f"{dataset.config.path or 'rows'}: {dataset.rows.place(index)}"
            raise ConfigError(
                field,
                value,
                f"{place} has bytes as {column!r}, want a text: decode it before, or leave it out",
            )


_WANTED = "want a class derived from MessageEnv, or a function that makes an env from a row"


class EnvTask(Task):
    """A conversation with an env that is made from the example."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        message_env: Annotated[Callable[[Any], MessageEnv], Cure(_WANTED)]
        """A class of envs, or a function: called with the example's ``env_input``, once for each rollout. Processes other than
        the command's import it by its name."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(EnvTask.Config, self).validate(field=field, policy_path=policy_path)
            field, made = f"{field}.message_env", self.message_env
            if isinstance(made, type) and not issubclass(made, MessageEnv):
                raise ConfigError(field, made, _WANTED)
            if missing := sorted(getattr(made, "__abstractmethods__", ())):
                raise ConfigError(
                    field,
                    made.__name__,
                    f"lacks {' and '.join(missing)}: define async def {missing[0]}(self, ...)",
                )
            try:
                inspect.signature(made).bind(None)
            except TypeError as error:
                raise ConfigError(
                    field, made.__name__, f"{error}; it is called with the row alone"
                ) from None

    config: Config

    def make_env(self, sample: DataSample) -> MessageEnv:
        return self.config.message_env(sample.env_input)


def env_task(
    data: Any,
    message_env: Callable[[Any], MessageEnv],
    *reward_fns: Callable[..., Any] | RewardFn,
    **fields: Any,
) -> EnvTask.Config:
    """The config of an EnvTask.

    Args:
        data: as for ``row_task``, also ``validation`` and ``split`` among the fields.
        message_env: a class derived from MessageEnv; its ``self.row`` is the row's dict.
        reward_fns: functions ``fn(completion, row)`` of the last thing that the model says, or RewardFn.
        fields: of EnvTask.Config, such as ``group_size`` and ``env=RendererEnvConfig(max_turns=3)``.

    Raises:
        ConfigError: the data is none of these.
    """
    return row_task(EnvTask.Config, data, *reward_fns, message_env=message_env, **fields)
