"""Records that become read-only, for good, when what they describe has ended.

A rollout is filled while it runs. When it has ended, `Freezable.freeze` makes the record and all
that it holds read-only. From then on everyone is given the same object: reward functions, rubrics,
``Algorithm.score_group``, filters, samplers, the recorder. ``Algorithm.score_rollout`` is given a
copy, which is read-only too. Examples and completions are read-only earlier: before envs and turn
loops are given them. Code that tries to change such a record fails in the line that tries::

    rollout.reward = 1.0                 AttributeError
    rollout.turns.pop()                  TypeError
    turn.completion.token_ids[0] = 5     ValueError (numpy)
    turn.assistant_message["content"]=x  TypeError

Copies can be changed. ``copy.deepcopy`` and pickle return records, dicts and lists that can be
changed at every depth; arrays too, but for pickle's protocol 5, which keeps them read-only.
``copy.copy`` and ``dataclasses.replace`` return a record whose fields can be set, but the records,
dicts, lists and arrays in them are still read-only.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, cast

import numpy as np


class Freezable:
    """Base of a dataclass with slots whose instances can be made read-only.

        turn = RolloutTurn(...)
        turn.rewards = {"solved": 1.0}      # a plain assignment
        turn.freeze()
        turn.rewards = {}                   # AttributeError

    A record that is frozen gets another class: a subclass of its own that refuses changes.
    """

    __slots__ = ()

    frozen: ClassVar[bool] = False

    def freeze(self, names: Iterable[str] | None = None) -> Self:
        """Make the record, and the records, arrays, dicts and lists that it holds, read-only.

        Return the record itself. A record that is frozen already stays as it is.

        Args:
            names: fields that may hold what can be changed; None if any may.
        """
        if not self.frozen:
            for name in _field_names(cast(Any, type(self))) if names is None else names:
                value = getattr(self, name)
                frozen = read_only(value)
                if frozen is not value:
                    setattr(self, name, frozen)
            self.__class__ = _frozen_class(cast(Any, type(self)))
        return self

    def thawed(self) -> Self:
        """Return a copy whose fields can be set; what they hold is shared with the record.

        Only the dataclass's fields are copied: no ``__post_init__`` runs, and attributes that it
        set are missing. It costs a third of ``dataclasses.replace``.
        """
        kind = _open_class(type(self))
        copy: Any = object.__new__(kind)
        for name in _field_names(kind):
            setattr(copy, name, getattr(self, name))
        return copy

    def amend(self, **values: Any) -> None:  # noqa: ANN401 - of the record's own fields
        """Set fields of a record that may be frozen.

        For the code that owns the record, such as the task that scores its own rollouts. The new
        values of a frozen record become read-only too (`read_only`): records among them in place.
        """
        for name, value in values.items():
            object.__setattr__(self, name, read_only(value) if self.frozen else value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _open_class(kind: type) -> type:
    """Return the class that a record had before it was frozen."""
    return kind.__mro__[1] if kind.__dict__.get("frozen") else kind


def _empty_record(kind: type) -> object:
    """Return a record without values, which pickle and copy then fill."""
    return object.__new__(kind)


@functools.cache
def _frozen_class(kind: type) -> type:
    """Return the read-only twin of a record's class, under the same name."""

    def refuse_change(self: object, name: str, *_: object) -> NoReturn:
        raise AttributeError(
            f"can't change {name} of this {kind.__name__}: it is read-only, as are all examples, "
            "completions, and rollouts that have ended"
        )

    def new(_: type, *args: object, **fields: object) -> object:
        return kind(*args, **fields)  # of ``dataclasses.replace``, whose record can be changed

    def reduce(self: object, protocol: SupportsIndex) -> tuple[Any, ...]:
        function, args, *state = cast(Any, super(frozen, cast(Any, self))).__reduce_ex__(protocol)
        if args[:1] == (frozen,):  # the class's own way names no class of ours
            function, args = _empty_record, (kind,)
        return (function, args, *state)

    def equal(self: Freezable, other: object) -> Any:  # noqa: ANN401 - or NotImplemented
        return self.thawed() == (other.thawed() if isinstance(other, Freezable) else other)

    namespace = {
        "__slots__": (),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__new__": new,
        "__reduce_ex__": reduce,
        "__eq__": equal,
        "__hash__": kind.__hash__,
        "__setattr__": refuse_change,
        "__delattr__": refuse_change,
        "frozen": True,
    }
    frozen = type(kind.__name__, (kind,), namespace)
    return frozen


def read_only(value: Any) -> Any:  # noqa: ANN401 - anything that a record may hold
    """Return a value that can't be changed in place.

    A dict, list or tuple becomes a copy whose entries are read-only, a writable array a read-only
    view of its memory, and a `Freezable` record is made read-only in place. Any other object is
    returned as it is, and what it holds stays writable: one of a user's class, or of a subclass of
    dict or tuple, whose copy would lose its class. A `ReadOnlyDict` or `ReadOnlyList` is returned
    as it is too, and its entries are not looked at. See `read_only_data` for messages.
    """
    freeze = _FREEZE.get(type(value))
    if freeze is not None:
        return freeze(value)
    return value.freeze() if isinstance(value, Freezable) else value


def read_only_data(value: Any) -> Any:  # noqa: ANN401 - a user's data
    """Return a copy of a message, or of other data that JSON holds, that can't be changed in place.

    Unlike `read_only` it makes a plain read-only dict of any Mapping, such as an OrderedDict, and a
    read-only list of any list: of data only the content counts.
    """
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: read_only_data(entry) for key, entry in value.items()})
    if isinstance(value, list):
        return ReadOnlyList(map(read_only_data, value))
    if isinstance(value, tuple):
        return tuple(map(read_only_data, value))
    return read_only(value)


def _freeze_array(array: np.ndarray) -> np.ndarray:
    if not array.flags.writeable:
        return array
    view = array.view()  # the array itself may be its owner's, such as a dataset's
    view.flags.writeable = False
    return view


def _refuse_change(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        "this dict or list is read-only, because it is part of a record: change a copy, such as "
        "copy.deepcopy(it)"
    )


class ReadOnlyDict(dict):
    """Dict that refuses changes. ``copy`` and ``|`` return plain dicts."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __reduce__(self) -> tuple[type, tuple[dict]]:
        return dict, (dict(self),)


class ReadOnlyList(list):
    """List that refuses changes. ``copy``, slices and ``+`` return plain lists."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = clear = extend = insert = pop = remove = _refuse_change
    reverse = sort = _refuse_change

    def __reduce__(self) -> tuple[type, tuple[list]]:
        return list, (list(self),)


_FREEZE: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: ReadOnlyDict({key: read_only(entry) for key, entry in value.items()}),
    list: lambda value: ReadOnlyList(map(read_only, value)),
    tuple: lambda value: tuple(map(read_only, value)),
    np.ndarray: _freeze_array,
}
"""Function that freezes a value, by the value's exact type: a user's subclass of dict is left
alone."""
