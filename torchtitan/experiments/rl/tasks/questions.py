"""Makes tasks from rows of data and reward functions, without a Task or a Config of one's own.

A question task (`question_task`) asks one question a row, and the answer ends the rollout. An env
task (`env_task`) makes an env from each row.
"""

import difflib
import functools
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from renderers import Message, ToolSpec

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import Cure, NonEmptyStr
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.rows import RowDataset, Rows, is_missing, row_datasets
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.envs.special_texts import control_token_in, render_as_text
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.answers import is_list
from torchtitan.experiments.rl.tasks.demonstrations import conversation_of, tools_in
from torchtitan.experiments.rl.tasks.task import Task

_BRACES = re.compile(r"\{([^{}]+)\}")
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\s*\w[\w .-]*")
"""Pattern of a text between braces that looks like the name of a column."""
_LATEX = re.compile(r"(?:\\[A-Za-z]+\*?(?:\{[^{}]*\}|\[[^\[\]]*\])*|[\^_])$")
"""Pattern of the end of a text after which braces belong to LaTeX: a command, ``^`` or ``_``."""

ANSWER_COLUMN = "answer"
"""Column of the right answer, which the preflight tries as a reply."""

TEMPLATE_TOKENS = 256
"""Maximum number of tokens that a chat template is assumed to add to a question.

Only a question that could be too long with these tokens is rendered to check its length.
"""


class QuestionEnv(MessageEnv):
    """Env that asks one question, or goes on with a conversation. The model's answer ends it."""

    def __init__(
        self,
        question: str | Sequence[Message],
        *,
        system_prompt: str | None = None,
        tools: Sequence[ToolSpec] = (),
        control_tokens: bool = False,
    ):
        """Initialize the env.

        Args:
            question: the user's message, or the messages of a conversation so far.
            system_prompt: text of a system message that comes first; None or "" for none.
            tools: tools that the model is told of. A call of one is its answer: none is made.
            control_tokens: True if special tokens in all of these are meant as control tokens.
        """
        self.tools = list(tools)
        self.control_tokens = control_tokens
        self.messages: list[Any] = []
        """Messages of the first prompt."""
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})
        if isinstance(question, str):
            self.messages.append({"role": "user", "content": question})
        else:
            self.messages += question

    async def reset(self) -> ResetOutput:
        return ResetOutput(
            messages=self.messages, tools=self.tools, control_tokens=self.control_tokens
        )

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)


class QuestionTask(Task):
    """Task that asks one question for each row of its dataset, and scores the one answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        template: str = "{question}"
        """Text of the user's message; {name} stands for the row's column of that name."""
        messages_column: NonEmptyStr | None = None
        """Column of the messages that the model answers, where the rows are chats. It replaces the
        template."""
        tools_column: NonEmptyStr | None = "tools"
        """Column of the tools that the model is told of beside the row's prompt, in OpenAI's
        format; a row may have none. A call is the model's answer: nothing answers it. A column that
        the template names is text. None if a column of that name is something else."""
        missing_text: str | None = None
        """Text that the template has in place of a missing value, such as "" for Alpaca's
        ``input``. If None, a row that lacks a value is refused."""
        system_prompt: str | None = None
        control_tokens: bool = False
        """True if special tokens in the text of a row, such as "<|im_end|>", are meant as control
        tokens of the prompt. Otherwise the model is shown them as text. Those of the template and
        of the system prompt always are control tokens, and no row may have one beside them."""
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
        self._columns: list[str] = []
        """Columns that the prompts are made of; none if the dataset has no rows."""
        for _, dataset in self._row_datasets():
            self._columns = self._checked_columns(dataset)
        template = "" if config.messages_column is not None else config.template
        own_texts = (template, config.system_prompt)
        self._own_control_token = control_token_in(own_texts, self.renderer)
        """Special token that the template or the system prompt has; None if they have none."""

    @property
    def writes_control_tokens(self) -> bool:
        """True if special tokens in a row's prompt are control tokens, and not text."""
        return self.config.control_tokens or self._own_control_token is not None

    def make_env(self, sample: DataSample) -> MessageEnv:
        row = sample.env_input
        return QuestionEnv(
            self.question_of(row),
            system_prompt=self.config.system_prompt,
            tools=self.tools_of(row),
            control_tokens=self.writes_control_tokens,
        )

    def check_examples(self, *, field: str) -> None:
        """See Task. Refuse chats that end with an answer, and warn of rows that teach nothing."""
        warnings = []
        for part, dataset in self._row_datasets():
            summary = self._odd_rows(dataset.rows, field=field)
            if summary:
                warnings.append(f"{field}.{part}: of {len(dataset):,} rows {summary}")
        self.examples_warning = "; ".join(warnings) or None

    def check_control_tokens(self, tokens: Collection[str], *, field: str) -> None:
        """See Task. Read the columns that prompts are made of.

        Rows are refused where the template or the system prompt has a control token too, since a
        prompt is rendered either with control tokens or with text. Others are only told of.
        """
        if self.config.control_tokens or not tokens:
            return
        pattern = re.compile("|".join(map(re.escape, sorted(tokens))))
        for part, dataset in self._row_datasets():
            for column in (*self._columns, dataset.config.demonstration_column):
                found = _matching_rows(pattern, dataset.rows, column)
                if not found:
                    continue
                index, token = next(iter(found.items()))
                location = dataset.rows.location(index)
                own = self._own_control_token
                if own is not None and column in self._columns:
                    others = len(found) - 1
                    subject = "other" if others == 1 else "others"
                    said = f" ({_counted(others, 'have one too', subject)})" if others else ""
                    cure = (
                        f"{location} has it in {column!r}{said}, where it would be a control token "
                        f"as the {own!r} of the template or the system prompt is: change the "
                        f"text, or set {field}.control_tokens = True if that is meant"
                    )
                    raise ConfigError(f"{field}.{part}", token, cure)
                subject = f"of {len(dataset):,} rows"
                told = (
                    f"{field}.{part}: {_counted(len(found), 'have a special token', subject)} "
                    f"in {column!r} (first: {location}, {token!r}), which the model is shown as "
                    "text; control_tokens = True makes it a control token"
                )
                self.examples_warning = "; ".join(filter(None, (self.examples_warning, told)))

    def known_answer(self, sample: DataSample) -> str | None:
        """Return the row's ``answer``, or the first of several, as text; None if it has none."""
        row = sample.env_input
        answer = row.get(ANSWER_COLUMN) if isinstance(row, dict) else None
        if is_list(answer):
            answer = answer[0] if len(answer) else None
        return None if is_missing(answer) or isinstance(answer, bytes) else str(answer)

    def question_of(self, row: dict[str, Any]) -> str | list[Message]:
        """Return the user's message that the row's template makes, or the row's messages."""
        column = self.config.messages_column
        if column is not None:
            return conversation_of(row, messages=column, tools="")[0]
        substitute = self.config.missing_text
        if substitute is not None:
            row = {name: substitute if value is None else value for name, value in row.items()}
        return fill(self.config.template, row)

    def tools_of(self, row: dict[str, Any]) -> list[ToolSpec]:
        """Return the tools that the model is told of beside the row's prompt.

        Raises:
            TypeError: an entry of the column has a wrong type.
            ValueError: an entry of the column is no tool.
        """
        column = self.config.tools_column
        if column is None or column in self._columns:
            return []
        try:
            return tools_in(row, column) or []
        except (TypeError, ValueError) as error:
            cure = f"set tools_column = None if {column!r} is something else"
            raise type(error)(f"{error}; {cure}") from error

    def _row_datasets(self) -> Iterator[tuple[str, RowDataset]]:
        """Yield the datasets that consist of rows, each with its field of the config."""
        for part, dataset in (("dataset", self.dataset), ("validation", self.validation)):
            if isinstance(dataset, RowDataset):
                yield part, dataset

    def _checked_columns(self, dataset: RowDataset) -> list[str]:
        """Return the columns that prompts are made of.

        Raises:
            ConfigError: there are none, or a row lacks one of them.
        """
        config = self.config
        if config.messages_column is not None:
            field, value = f"{self.name}.messages_column", config.messages_column
            columns = [config.messages_column]
        else:
            field, value = f"{self.name}.template", config.template
            columns = placeholders(
                config.template, {column for row in dataset.rows for column in row}
            )
        may_lack = config.messages_column is None and config.missing_text is not None
        for column in columns:
            _check_column(dataset, column, field, value, task=self.name, may_lack=may_lack)
        if not columns:
            raise ConfigError(field, value, "names no column of the data, such as {question}")
        return columns

    def _odd_rows(self, rows: Rows, *, field: str) -> str:
        """Return how many rows are odd in which way, and where the first is; "" if none is.

        Raises:
            ConfigError: a row's messages are no conversation that the model could go on with.
        """
        expected = [column for column in _usual_columns(rows) if column not in set(self._columns)]
        odd: dict[str, list[int]] = {}
        seen: set[int] = set()
        for index, row in enumerate(rows):
            faults = [f"have no {column!r}" for column in expected if row.get(column) is None]
            digest = hash(repr(row))
            if digest in seen:
                faults.insert(0, "repeat another")
            seen.add(digest)
            faults += self._odd_texts(row)
            question, tools = self._checked_question(row, rows.location(index), field=field)
            if not self._has_room(question, tools):
                limit = self.config.env.max_rollout_tokens
                faults.append(f"leave no room for an answer in env.max_rollout_tokens = {limit}")
            for fault in faults:
                odd.setdefault(fault, []).append(index)
        odd |= _mixed_types(rows)
        return ", ".join(
            f"{_counted(len(indices), fault)} (first: {rows.location(indices[0])})"
            for fault, indices in odd.items()
        )

    def _odd_texts(self, row: dict[str, Any]) -> list[str]:
        """Return what is odd about the values that the row's template is filled with."""
        if self.config.messages_column is not None:
            return []
        faults = []
        for column in self._columns:
            value = row[column]
            if isinstance(value, list | dict):
                faults.append(f"have a {type(value).__name__} as {column!r}, not a text")
            elif value is not None and not str(value).strip():
                faults.append(f"have an empty {column!r}")
        return faults

    def _checked_question(
        self, row: dict[str, Any], location: str, *, field: str
    ) -> tuple[str | list[Message], list[ToolSpec]]:
        """Return the row's question, and the tools that the model is told of.

        Raises:
            ConfigError: the row's messages are no conversation, or end with an answer, or its tools
                can't be offered.
        """
        column = self.config.messages_column
        try:
            question = self.question_of(row)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{field}.messages_column", column, f"{location}: {error}") from None
        try:
            tools = self.tools_of(row)
        except (TypeError, ValueError) as error:
            named = self.config.tools_column
            raise ConfigError(f"{field}.tools_column", named, f"{location}: {error}") from None
        if not isinstance(question, str) and question[-1]["role"] == "assistant":
            cure = (
                f"{location} ends with an assistant's message; the model answers a user's or a "
                "tool's message: leave the answer out, or put it into a column of its own"
            )
            raise ConfigError(f"{field}.messages_column", column, cure)
        return question, tools

    def _has_room(self, question: str | list[Message], tools: list[ToolSpec]) -> bool:
        """Return True if the prompt is shorter than a rollout may be."""
        limit = self.config.env.max_rollout_tokens
        texts = repr((question, tools) if tools else question)
        if 2 * len(texts.encode()) + TEMPLATE_TOKENS < limit:
            return True  # no token is shorter than a byte
        messages = QuestionEnv(question, system_prompt=self.config.system_prompt).messages
        render = self.renderer.render
        if not self.writes_control_tokens:
            render = functools.partial(render_as_text, self.renderer)
        rendered = render(messages, tools=tools or None, add_generation_prompt=True)
        return len(rendered.token_ids) < limit


def question_task(
    data: object,
    *reward_fns: Callable[..., Any] | RewardFn,
    **fields: Any,  # noqa: ANN401 - typed by the config
) -> QuestionTask.Config:
    """Return the config of a QuestionTask.

    Args:
        data: rows, as for ``row_task``.
        reward_fns: functions ``fn(completion, example)`` where the example is the row's dict, or
            RewardFn.
        fields: ``validation`` and ``split`` of ``row_task``, and fields of QuestionTask.Config,
            such as ``template``.

    Raises:
        ConfigError: the data is none of these.

    Example::

        from torchtitan.experiments.rl.tasks import question_task

        def exact(completion, row):
            return float(completion.strip() == row["answer"])

        rows = [{"question": "6 * 7?", "answer": "42"}]  # or a file, such as "rows.jsonl"
        task = question_task(rows, exact, template="Calculate {question}", group_size=4)
    """
    return row_task(QuestionTask.Config, data, *reward_fns, **fields)


C = TypeVar("C", bound=Task.Config)


def row_task(
    config: type[C],
    data: object,
    *reward_fns: Callable[..., Any] | RewardFn,
    validation: object = None,
    split: float | None = None,
    **fields: Any,  # noqa: ANN401 - typed by the config
) -> C:
    """Return a task's config, made of rows and reward functions.

    Args:
        config: class of the task's config.
        data: a .jsonl, .json, .csv, .tsv or .parquet file (text also as .gz), several by a pattern
            such as "shards/*.jsonl", a folder of ``save_to_disk``, a dataset of the hub, a list of
            dicts, a table (pandas, polars, pyarrow, ``datasets.Dataset``), or a dataset's config.
        reward_fns: functions ``fn(completion, example)``, or RewardFn; none leaves the rubric as
            the config has it.
        validation: rows that the policy is measured on and never trained on, given as ``data`` is.
        split: share of ``data`` that is trained on, such as 0.9. The rest is the validation, unless
            ``validation`` is given.
        fields: fields of the config, such as ``group_size``.

    Raises:
        ConfigError: the data is none of these.
    """
    for functions in reward_fns:
        if isinstance(functions, list | tuple):
            names = ", ".join(getattr(entry, "__name__", "fn") for entry in functions)
            raise ConfigError("reward_fns", functions, f"give them one by one: (rows, {names})")
    if reward_fns:
        fields["rubric"] = Rubric.Config(reward_fns=list(reward_fns))
    dataset, held_out = row_datasets(data, validation, split)
    return config(dataset=dataset, validation=held_out, **fields)


def fill(template: str, row: dict[str, Any]) -> str:
    """Return ``template`` with each {column} replaced by the row's value. Other braces stay.

    Raises:
        KeyError: a word between braces is no column of the row.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        return str(row[name]) if name in row or _WORD.fullmatch(name) else match[0]

    return _BRACES.sub(replacement, template)


def placeholders(template: str, columns: Collection[str]) -> list[str]:
    """Return the texts between braces that name a column, or look like the name of one.

    "q-2" and "the question" look like one; the exponent of ``^{n - 1}`` does not.
    """
    names = []
    for match in _BRACES.finditer(template):
        name = match[1]
        is_latex = _LATEX.search(template[: match.start()]) is not None
        looks_like_column = _NAME.fullmatch(name) is not None and not is_latex
        if name in columns or _WORD.fullmatch(name) or looks_like_column:
            names.append(name)
    return names


def _counted(count: int, fault: str, subject: str = "") -> str:
    """Return how many rows have a fault, which begins with a verb in the plural.

    ``_counted(1, "have no 'answer'")`` is "1 has no 'answer'".
    """
    verb, _, rest = fault.partition(" ")
    if count == 1:
        verb = "has" if verb == "have" else f"{verb}s"
    return " ".join(filter(None, (f"{count:,}", subject, verb, rest)))


def _usual_columns(rows: Rows) -> list[str]:
    """Return the columns of the first row for which more than half of the rows have a value."""
    return [
        column for column in rows[0] if sum(row.get(column) is None for row in rows) < len(rows) / 2
    ]


def _matching_rows(pattern: re.Pattern[str], rows: Rows, column: str) -> dict[int, str]:
    """Return the first match of ``pattern`` in a column, by the index of each row that has one."""
    matches = (pattern.search(str(row.get(column))) for row in rows)
    return {index: match[0] for index, match in enumerate(matches) if match is not None}


def _mixed_types(rows: Rows) -> dict[str, list[int]]:
    """Return the rows with a text where most of the column are numbers, or the other way round.

    The keys say what is odd about the rows.
    """
    mixed: dict[str, list[int]] = {}
    for column in dict.fromkeys(column for row in rows for column in row):
        texts = [index for index, row in enumerate(rows) if isinstance(row.get(column), str)]
        numbers = [
            index for index, row in enumerate(rows) if isinstance(row.get(column), int | float)
        ]
        if not texts or not numbers:
            continue
        rare, usual = ("text", "number") if len(texts) < len(numbers) else ("number", "text")
        fault = (
            f"have a {rare} as {column!r} where the others have a {usual}, which are never equal"
        )
        mixed[fault] = min(numbers, texts, key=len)
    return mixed


def _check_column(
    dataset: RowDataset, column: str, field: str, value: str, *, task: str, may_lack: bool
) -> None:
    """Refuse rows that lack a column of the prompt, or that have bytes or, for a text, chats in it.

    Args:
        field: field of the config that names the column.
        value: value of that field.
        task: name of the task.
        may_lack: True if a text stands in for a missing value.

    Raises:
        ConfigError: naming ``field`` and the first row at fault.
    """
    rows = dataset.rows
    source = dataset.config.path or "rows"
    is_template = field.endswith(".template")
    columns = dict.fromkeys(name for row in rows for name in row)
    if column not in columns:
        cure = f"the data has no column {column!r}; it has {', '.join(columns)}"
        others = [name for name in columns if name != ANSWER_COLUMN]
        chats = [name for name in others if any(_is_chat(row.get(name)) for row in rows)]
        if chats:
            option = _option(task, "messages_column", chats[0])
            cure = f"{cure}: name that of the chats by {option}"
        elif others and is_template:
            nearest = difflib.get_close_matches(column, others, n=1) or others
            option = _option(task, "template", f"{{{nearest[0]}}}")
            cure = f"{cure}: name one of them, such as by {option}"
        raise ConfigError(field, value, cure)
    lacking = [index for index, row in enumerate(rows) if row.get(column) is None]
    if lacking and not may_lack:
        more = len(lacking) - 1
        others_said = f", and {more:,} other{'s' if more > 1 else ''}" if more else ""
        cure = "fill it in, or remove the row"
        if is_template:
            cure = f"{cure}, or give {_option(task, 'missing_text', '')} to ask an empty text there"
        location = rows.location(lacking[0])
        raise ConfigError(
            field, value, f"{source}: {location} has no {column!r}{others_said}: {cure}"
        )
    for index, row in enumerate(rows):
        if isinstance(row[column], bytes | bytearray | memoryview):
            cure = (
                f"{source}: {rows.location(index)} has bytes as {column!r}, want a text: decode it "
                "before, or leave it out"
            )
            raise ConfigError(field, value, cure)
        if is_template and _is_chat(row[column]):
            cure = (
                f"{source}: {rows.location(index)} has a list of messages as {column!r}, want a "
                f"text: where the rows are chats, give {_option(task, 'messages_column', column)}"
            )
            raise ConfigError(field, value, cure)


def _is_chat(value: object) -> bool:
    """Return True for a list of messages, by OpenAI's names of their fields or by ShareGPT's."""
    return (
        is_list(value)
        and len(value) > 0
        and all(
            isinstance(message, dict)
            and ({"role", "content"} <= {*message} or {"from", "value"} <= {*message})
            for message in value
        )
    )


def _option(task: str, field: str, value: str) -> str:
    """Return the words of a command line that set a field of a task."""
    return f"--tasks.{task}.{field}".replace("_", "-") + f" {shlex.quote(value)}"


_WANTED = "want a class derived from MessageEnv, or a function that makes an env from a row"


class EnvTask(Task):
    """Task whose rollouts are conversations with an env that is made from the example."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        message_env: Annotated[Callable[[Any], MessageEnv], Cure(_WANTED)]
        """Class of envs, or function that makes one: called with the example's ``env_input``, once
        for each rollout. Processes other than the command's import it by its name."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(EnvTask.Config, self).validate(field=field, policy_path=policy_path)
            field = f"{field}.message_env"
            factory = self.message_env
            if isinstance(factory, type) and not issubclass(factory, MessageEnv):
                raise ConfigError(field, factory, _WANTED)
            missing = sorted(getattr(factory, "__abstractmethods__", ()))
            if missing:
                cure = f"lacks {' and '.join(missing)}: define async def {missing[0]}(self, ...)"
                raise ConfigError(field, factory.__name__, cure)
            try:
                inspect.signature(factory).bind(None)
            except TypeError as error:
                cure = f"{error}; it is called with the row alone"
                raise ConfigError(field, factory.__name__, cure) from None

    config: Config

    def make_env(self, sample: DataSample) -> MessageEnv:
        return self.config.message_env(sample.env_input)


def env_task(
    data: object,
    message_env: Callable[[Any], MessageEnv],
    *reward_fns: Callable[..., Any] | RewardFn,
    **fields: Any,  # noqa: ANN401 - typed by the config
) -> EnvTask.Config:
    """Return the config of an EnvTask.

    Args:
        data: rows, as for ``row_task``.
        message_env: a class derived from MessageEnv; its ``self.row`` is the row's dict.
        reward_fns: functions ``fn(completion, row)`` of the last thing that the model says, or
            RewardFn.
        fields: ``validation`` and ``split`` of ``row_task``, and fields of EnvTask.Config, such as
            ``group_size`` and ``env=RendererEnvConfig(max_turns=3)``.

    Raises:
        ConfigError: the data is none of these.

    Example::

        from torchtitan.experiments.rl.tasks import *

        class AskEnv(MessageEnv):
            async def reset(self):
                return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])

            async def step_message(self, message):
                return StepOutput(env_messages=[], done=True)

        task = env_task([{"question": "6 + 7?", "answer": "13"}], AskEnv, right_answer)
    """
    return row_task(EnvTask.Config, data, *reward_fns, message_env=message_env, **fields)
